"""A short run of the coverage-guided fuzzer from the corpus of longer runs, and a check that it can fail."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("atheris", reason="there is no wheel for this machine")

CORPUS = Path(__file__).parent / "corpus"
RUNS = {"body": 2_000, "head": 5_000, "message": 5_000, "session": 20_000}
RUN_SECONDS = 300.0
MAX_CORPUS_BYTES = 200_000


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        cwd=CORPUS.parents[3],
    )


@pytest.mark.parametrize("target", RUNS)
def test_no_input_raises_anything_but_what_clients_are_told(target: str) -> None:
    done = run(
        "-m", "tests.nightly.hostile.coverage_fuzz", target, "--runs", str(RUNS[target]), "--minutes", "4"
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    assert "DONE" in done.stderr


def test_a_defect_is_found_and_its_input_can_be_run_again(tmp_path: Path) -> None:
    planted = (
        "import sys; from tests.nightly.hostile import coverage_fuzz as fuzz\n"
        "from blockyard.router.openai.http import body\n"
        "body._refuse_constant = lambda name: 1 / 0\n"
        "sys.argv[1:] = ['body', *sys.argv[1:]]\n"
        "fuzz.main()\n"
    )
    bad = tmp_path / "bad"
    bad.write_bytes(b'c{"n": NaN}')
    done = run("-c", planted, str(bad))
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stdout + done.stderr
    assert run("-m", "tests.nightly.hostile.coverage_fuzz", "body", str(bad)).returncode == 0


def test_the_corpus_is_small() -> None:
    sizes = {file.relative_to(CORPUS): file.stat().st_size for file in CORPUS.rglob("*") if file.is_file()}
    assert {path.parts[0] for path in sizes} == set(RUNS)
    assert sum(sizes.values()) < MAX_CORPUS_BYTES
