"""`python -m tests.nightly.mutants PACKAGE...`: change the product in many small ways, and count what its tests notice.

First it runs the tests once, and notes which functions each of them reaches. Then it makes the chosen mutants, one after
another, in a copy of the tree, and runs the tests that reach the changed function, until one fails. `--out` keeps the
verdicts. `--again FILE` tries the mutants that were killed there: so two versions of the tests can be compared.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

from .operators import Mutant, mutants_of, with_probes
from .runs import Answer, Job, answers, copied_trees, rewritten

ROOT = Path(__file__).parents[3]
FILES_A_RUN = 8
MOST_SECONDS = 60.0
"""Most that the tests of one mutant may take where the product is sound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    mutant: Mutant
    word: str
    """killed, survived or unreached."""
    by: str = ""
    """Test that failed first."""


def chosen(tree: Path, packages: Sequence[str], count: int | None, seed: int) -> list[Mutant]:
    """Return `count` mutants of these files and folders. A seed chooses the same ones while their code stays."""
    paths = [tree / package for package in packages]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    found = [mutant for file in files if "_pb2" not in file.name for mutant in mutants_of(tree, file)]
    return sorted(found, key=lambda mutant: sha256(f"{seed} {mutant.name}".encode()).digest())[:count]


def reached(trees: list[Path], files: set[str], tests: Sequence[str], options: Sequence[str]) -> Answer:
    """Run the tests once, and return what each reaches of these files. Tests that fail on the sound product are left
    out."""
    paths = [trees[0] / test.partition("::")[0] for test in tests]
    found = [
        path for path in paths for path in ([path] if path.is_file() else sorted(path.rglob("test_*.py")))
    ]
    names = (
        [str(path.relative_to(trees[0])) for path in found] if not any("::" in t for t in tests) else [*tests]
    )
    # Neighbours are apart, so that the slow files of a folder do not come last.
    count = -(-len(names) // FILES_A_RUN)
    probes = {name: with_probes((trees[0] / name).read_text(), name).encode() for name in files}
    jobs = [
        Job(
            subject=None,
            arguments=(*names[part::count], *options),
            seconds=1800,
            changed=lambda tree: rewritten({tree / name: text for name, text in probes.items()}),
        )
        for part in range(count)
    ]
    total: Answer = {"seconds": {}, "reached": {}, "failed": []}
    for job, answer in answers(jobs, trees):
        if "log" in answer:
            raise RuntimeError(f"no result of {' '.join(job.arguments)}: {answer['log']}")
        for key, value in answer.items():
            total[key] = total[key] + value if key == "failed" else total[key] | value
    return total


def tests_of(mutant: Mutant, sound: Answer, most_seconds: float) -> list[str]:
    """Return the tests that reach the changed function, or its module for code outside of functions: quick files
    first."""
    where = f"{mutant.file} {mutant.function}"
    names = {
        name for names in sound["reached"].values() for name in names if name.startswith(f"{mutant.file} ")
    }
    names = {where} if where in names else names
    reach = {key for key, values in sound["reached"].items() if not names.isdisjoint(values)}
    tests = [test for test in sound["seconds"] if {test, test.partition("::")[0]} & reach]
    tests = [test for test in tests if test not in sound["failed"]]
    of_file: Counter[str] = Counter()
    for test in tests:
        of_file[test.partition("::")[0]] += sound["seconds"][test]
    left, taken = most_seconds, []
    for test in sorted(tests, key=lambda test: (of_file[test.partition("::")[0]], test.partition("::")[0])):
        left -= sound["seconds"][test]
        if left >= 0 or not taken:
            taken.append(test)
    return taken


def verdicts(
    mutants: Iterable[Mutant], sound: Answer, trees: list[Path], most_seconds: float, options: Sequence[str]
) -> Iterator[Verdict]:
    jobs = []
    for mutant in mutants:
        if not (tests := tests_of(mutant, sound, most_seconds)):
            yield Verdict(mutant=mutant, word="unreached")
            continue
        seconds = 30 + 5 * sum(sound["seconds"][test] for test in tests)
        arguments = (*tests, "-x", *options)
        jobs.append(
            Job(subject=mutant, arguments=arguments, seconds=seconds, changed=partial(_broken, mutant))
        )
    for job, answer in answers(jobs, trees):
        failed = answer.get("failed", ["it hung or died"])
        yield Verdict(mutant=job.subject, word="killed" if failed else "survived", by=(failed or [""])[0])


def _broken(mutant: Mutant, tree: Path) -> object:
    path = tree / mutant.file
    return rewritten({path: mutant.apply(path.read_bytes())})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nightly.mutants", description=__doc__)
    parser.add_argument(
        "packages", nargs="+", metavar="PACKAGE", help="folder or file, such as router/placement"
    )
    parser.add_argument("--runs", type=int, default=50, help="mutants to try (50)")
    parser.add_argument("--seed", type=int, default=0, help="chooses them (0)")
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout to copy; this one by default")
    parser.add_argument("--tests", nargs="+", default=["tests/unit"], metavar="PATH", help="below the tree")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (2)")
    parser.add_argument("--seconds", type=float, default=MOST_SECONDS, help="most for a mutant's tests (60)")
    parser.add_argument(
        "--option", action="append", default=[], help="of pytest, such as --option=--every-case"
    )
    parser.add_argument("--out", type=Path, help="keep the verdicts there, one line of JSON each")
    parser.add_argument("--again", type=Path, metavar="FILE", help="try those that were killed by that --out")
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    wanted = chosen(tree, arguments.packages, None if arguments.again else arguments.runs, arguments.seed)
    if arguments.again:
        lines = map(json.loads, arguments.again.read_text().splitlines())
        killed = {line["name"] for line in lines if line["word"] == "killed"}
        wanted = [mutant for mutant in wanted if mutant.name in killed]
        for name in sorted(killed - {mutant.name for mutant in wanted}):
            print(f"gone      {name}")
    words: Counter[str] = Counter()
    with copied_trees(tree, arguments.jobs) as trees:
        sound = reached(trees, {mutant.file for mutant in wanted}, arguments.tests, arguments.option)
        print(f"{len(sound['seconds'])} tests, {len(set(sound['failed']))} of them fail on the sound product")
        for verdict in verdicts(wanted, sound, trees, arguments.seconds, arguments.option):
            words[verdict.word] += 1
            print(f"{verdict.word:9} {verdict.mutant.name}  {verdict.by}", flush=True)
            if arguments.out:
                line = {"name": verdict.mutant.name, "word": verdict.word, "by": verdict.by}
                with arguments.out.open("a") as file:
                    file.write(f"{json.dumps(line)}\n")
    print(", ".join(f"{count} {word}" for word, count in words.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
