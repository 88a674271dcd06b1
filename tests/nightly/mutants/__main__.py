"""`python -m tests.nightly.mutants PACKAGE...`: make small changes to the product, and count what its tests notice.

First it runs the tests once, and notes which functions each of them reaches. Then it makes one change after another, in
a copy of the tree, and runs the tests that reach the changed function, until one fails. `--out` keeps the verdicts.
`--again FILE` tries the mutants that were killed there, so that two versions of the tests can be compared. `--rows`
tries the mutants that a row of the fault matrix must notice, on the tests of that row.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path

from .operators import Mutant, mutants_of, replaced, with_probes
from .rows import of_rows, texts
from .runs import Answer, Job, answers, copied_trees

ROOT = Path(__file__).parents[3]
FILES_A_RUN = 8
ROW_SECONDS = 900.0
Verdict = tuple[str, str, str]
"""Name of the mutant; killed, survived, unreached or skipped; the test that failed."""


def mutants_in(tree: Path, packages: Sequence[str], seed: int) -> list[Mutant]:
    """Return all mutants of these files and folders, in an order that the seed decides whatever other code changes."""
    paths = [tree / package for package in packages]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    found = [mutant for file in files if "_pb2" not in file.name for mutant in mutants_of(tree, file)]
    return sorted(found, key=lambda mutant: sha256(f"{seed} {mutant.name}".encode()).digest())


def reached(trees: list[Path], files: set[str], tests: Sequence[str], options: Sequence[str]) -> Answer:
    """Run the tests once on the sound product, and return what each reaches of these files."""
    paths = [trees[0] / test for test in tests]
    found = [
        path for path in paths for path in ([path] if path.is_file() else sorted(path.rglob("test_*.py")))
    ]
    names = [str(path.relative_to(trees[0])) for path in found]
    probes = {Path(name): with_probes((trees[0] / name).read_text(), name).encode() for name in files}
    # Neighbours are apart, so that the slow files of a folder do not come last.
    count = -(-len(names) // FILES_A_RUN)
    jobs = [Job(name="", arguments=(*names[n::count],), seconds=1800, texts=probes) for n in range(count)]
    total: Answer = {"seconds": {}, "reached": {}, "failed": []}
    for job, answer in answers(jobs, trees, *options):
        if "log" in answer:
            raise RuntimeError(f"no result of {' '.join(job.arguments)}: {answer['log']}")
        total = {
            "seconds": total["seconds"] | answer["seconds"],
            "reached": total["reached"] | answer["reached"],
            "failed": total["failed"] + answer["failed"],
        }
    return total


def tests_of(mutant: Mutant, sound: Answer, most_seconds: float) -> list[str]:
    """Return the tests that reach the changed function, or its module for code outside of functions: quick files
    first."""
    reached: dict[str, list[str]] = sound["reached"]
    of_module = {name for names in reached.values() for name in names if name.startswith(f"{mutant.file} ")}
    names = {mutant.function} if mutant.function in of_module else of_module
    keys = {key for key, values in reached.items() if not names.isdisjoint(values)}
    file_of = {test: test.partition("::")[0] for test in sound["seconds"]}
    tests = [test for test, file in file_of.items() if {test, file} & keys and test not in sound["failed"]]
    seconds = Counter[str]()
    for test in tests:
        seconds[file_of[test]] += sound["seconds"][test]
    taken: list[str] = []
    for test in sorted(tests, key=lambda test: (seconds[file_of[test]], file_of[test])):
        most_seconds -= sound["seconds"][test]
        if most_seconds >= 0 or not taken:
            taken.append(test)
    return taken


def jobs_of(mutants: Iterable[Mutant], sound: Answer, tree: Path, most_seconds: float) -> Iterator[Job]:
    for mutant in mutants:
        tests = tests_of(mutant, sound, most_seconds)
        changed = replaced((tree / mutant.file).read_bytes(), mutant.node, mutant.made)
        seconds = 30 + 5 * sum(sound["seconds"][test] for test in tests)
        yield Job(name=mutant.name, arguments=(*tests,), seconds=seconds, texts={Path(mutant.file): changed})


def jobs_of_rows(rows: list[int], tree: Path) -> Iterator[Job]:
    for row, mutant in of_rows(rows):
        changed = {path.relative_to(tree): text for path, text in texts(tree, mutant).items()}
        yield Job(name=mutant, arguments=("tests/nightly",), seconds=ROW_SECONDS, texts=changed, row=row)


def verdicts(jobs: Iterable[Job], trees: list[Path], options: Sequence[str]) -> Iterator[Verdict]:
    listed = list(jobs)
    yield from ((job.name, "unreached", "") for job in listed if not job.arguments)
    for job, answer in answers([job for job in listed if job.arguments], trees, "-x", *options):
        if failed := answer.get("failed", ["it hung or died"]):
            yield job.name, "killed", failed[0]
        else:
            yield job.name, "survived" if answer["num_passed"] else "skipped", ""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.nightly.mutants", description=__doc__)
    made.add_argument(
        "packages", nargs="*", metavar="PACKAGE", help="folder or file, such as router/placement"
    )
    made.add_argument(
        "--rows", nargs="*", type=int, metavar="ROW", help="of the fault matrix; all by default"
    )
    made.add_argument("--runs", type=int, default=50, help="mutants to try (50)")
    made.add_argument("--seed", type=int, default=0, help="chooses them (0)")
    made.add_argument("--tree", type=Path, default=ROOT, help="checkout to copy; this one by default")
    made.add_argument("--tests", nargs="+", default=["tests/unit"], metavar="PATH", help="below the tree")
    made.add_argument("--jobs", type=int, default=2, help="runs at a time (2)")
    made.add_argument("--seconds", type=float, default=60.0, help="most for the tests of a mutant (60)")
    made.add_argument(
        "--option", action="append", default=[], help="of pytest, such as --option=--every-case"
    )
    made.add_argument("--out", type=Path, help="keep the verdicts there, one line of JSON each")
    made.add_argument("--again", type=Path, metavar="FILE", help="try those that were killed by that --out")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    tree, words = arguments.tree.resolve(), Counter[str]()
    wanted = mutants_in(tree, arguments.packages, arguments.seed)
    if arguments.again:
        lines = map(json.loads, arguments.again.read_text().splitlines())
        killed = {name for name, word, _ in lines if word == "killed"}
        print(
            *(f"gone      {name}" for name in sorted(killed - {mutant.name for mutant in wanted})), sep="\n"
        )
        wanted = [mutant for mutant in wanted if mutant.name in killed]
    else:
        wanted = wanted[: arguments.runs]
    with copied_trees(tree, arguments.jobs) as trees:
        if arguments.rows is not None:
            jobs = jobs_of_rows(arguments.rows, tree)
        else:
            sound = reached(trees, {mutant.file for mutant in wanted}, arguments.tests, arguments.option)
            print(f"{len(sound['seconds'])} tests; these fail on the sound product: {sound['failed']}")
            jobs = jobs_of(wanted, sound, tree, arguments.seconds)
        for verdict in verdicts(jobs, trees, arguments.option):
            name, word, failed = verdict
            words[word] += 1
            print(f"{word:9} {name}  {failed}", flush=True)
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(f"{json.dumps(verdict)}\n")
    print(", ".join(f"{count} {word}" for word, count in words.most_common()))
    return 1 if arguments.rows is not None and set(words) > {"killed"} else 0


if __name__ == "__main__":
    sys.exit(main())
