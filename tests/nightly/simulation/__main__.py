"""`python -m tests.nightly.simulation --runs N --seed S`: runs seeds S to S + N - 1, and says which broke what.

`--seed S --runs 1 --log` shows one run, event by event. Runs do not depend on PYTHONHASHSEED as far as we know. Every
run started here sets it to 0 all the same, so that a reported seed can be shown again.
"""

import argparse
import os
import sys
from collections import Counter

from tests.unit.simulation.runs import run_scenario
from tests.unit.simulation.scenario import pulling, scenario


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.nightly.simulation", *sys.argv[1:]])
    parser = argparse.ArgumentParser(prog="python -m tests.nightly.simulation", description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", action="store_true", help="show every event")
    parser.add_argument("--pulls", action="store_true", help="scenarios that are about pulls")
    arguments = parser.parse_args()
    broken, happened = [], Counter[str]()
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        chosen = (pulling if arguments.pulls else scenario)(seed)
        result = run_scenario(chosen)
        if arguments.log:
            print(chosen.describe())
            for event in result.log:
                print(*event)
        happened.update(result.outcomes)
        happened.update({kind.name: count for kind, count in result.struck.items()} | result.pulls)
        if result.violation:
            broken.append(seed)
            print(f"seed {seed}: {result.violation}", flush=True)
    print(f"happened: {dict(happened.most_common())}")
    print(f"broken: {broken or 'none'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
