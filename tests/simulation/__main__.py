"""`python -m tests.simulation --runs N --seed S`: runs seeds S to S + N - 1, and says which of them broke what.

`--seed S --runs 1 --log` shows one run, event by event. Runs do not depend on PYTHONHASHSEED as far as we know. Every
run started here sets it to 0 all the same, so that a reported seed can be shown again.
"""

import argparse
import os
import sys
import time
from collections import Counter

from .runs import Run, run
from .scenario import scenario


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", action="store_true", help="show every event")
    arguments = parser.parse_args()
    broken, outcomes, struck, travels = [], Counter[str](), Counter[str](), Counter[str]()
    began, virtual_seconds = time.monotonic(), 0.0
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        result = run(seed)
        if arguments.log:
            _show(result)
        outcomes.update(result.outcomes)
        struck.update({kind.name: count for kind, count in result.struck.items()})
        travels.update({"sequences moved": result.num_moves, "blocks pulled": result.num_pulled_blocks})
        virtual_seconds += result.seconds
        if result.violation:
            broken.append(seed)
            print(f"seed {seed}: {result.violation}", flush=True)
    seconds = time.monotonic() - began
    print(f"{arguments.runs} runs in {seconds:.1f} s, {virtual_seconds:,.0f} s of virtual time")
    print(f"outcomes: {dict(outcomes.most_common())}")
    print(f"faults: {dict(struck.most_common())}")
    print(f"between workers: {dict(travels)}")
    print(f"broken: {broken or 'none'}")
    return 1 if broken else 0


def _show(result: Run) -> None:
    print(scenario(result.seed).describe())
    for event in result.log:
        print(*event)


if __name__ == "__main__":
    sys.exit(main())
