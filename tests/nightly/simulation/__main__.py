"""`python -m tests.simulation --runs N --seed S`: runs seeds S to S + N - 1, and says which of them broke what.

`--seed S --runs 1 --log` shows one run, event by event. Runs do not depend on PYTHONHASHSEED as far as we know. Every
run started here sets it to 0 all the same, so that a reported seed can be shown again.
"""

import argparse
import os
import sys
import time
from collections import Counter

from .runs import run_scenario
from .scenario import pulling, scenario


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", action="store_true", help="show every event")
    parser.add_argument("--pulls", action="store_true", help="scenarios that are about pulls")
    arguments = parser.parse_args()
    chosen = pulling if arguments.pulls else scenario
    broken, outcomes, struck, pulls = [], Counter[str](), Counter[str](), Counter[str]()
    num_moves = num_splits = 0
    began, virtual_seconds = time.monotonic(), 0.0
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        result = run_scenario(chosen(seed))
        if arguments.log:
            print(chosen(seed).describe())
            for event in result.log:
                print(*event)
        outcomes.update(result.outcomes)
        struck.update({kind.name: count for kind, count in result.struck.items()})
        pulls.update(result.pulls)
        num_moves += result.num_moves
        num_splits += result.num_splits
        virtual_seconds += result.seconds
        if result.violation:
            broken.append(seed)
            print(f"seed {seed}: {result.violation}", flush=True)
    seconds = time.monotonic() - began
    print(f"{arguments.runs} runs in {seconds:.1f} s, {virtual_seconds:,.0f} s of virtual time")
    print(f"outcomes: {dict(outcomes.most_common())}")
    print(f"faults: {dict(struck.most_common())}")
    print(f"pulls: {dict(pulls.most_common())}")
    print(f"sequences moved: {num_moves}, requests split: {num_splits}")
    print(f"broken: {broken or 'none'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
