"""`python tools/slowest_tests.py FILE...`: prints the ten slowest tests of pytest's reports (`--junitxml`)."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree

NUM_SHOWN = 10


def seconds_of(reports: Iterable[Path]) -> Iterator[tuple[float, str]]:
    """Yield how long each test of the reports took, with its module and name."""
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            yield float(case.get("time", 0)), f"{case.get('classname')}::{case.get('name')}"


def main() -> None:
    print(f"== the {NUM_SHOWN} slowest tests")
    for seconds, name in sorted(seconds_of(map(Path, sys.argv[1:])), reverse=True)[:NUM_SHOWN]:
        print(f"{seconds:6.1f} s  {name}")


if __name__ == "__main__":
    main()
