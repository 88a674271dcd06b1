"""Every program in examples/ runs unchanged against a real cluster, and prints what it promises."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .rig import ROOT

EXAMPLES = ROOT / "examples"
RUN_SECONDS = 120.0
SAYS = {
    "streaming_chat.py": r"tokens from worker-\d, because of \w+\n\d+ of \d+ prompt tokens were cached\n",
    "many_requests.py": r"worker-\d answered \d+ of 24\n",
    "json_answer.py": r" has \d+ lines, test: (True|False)\n",
    "chat_session.py": r"\[worker-\d: [1-9]\d* of \d+ prompt tokens cached\]\n$",
    "errors_and_timeouts.py": (
        r"sampling.top_p must be above 0 and at most 1\n.*MODEL_NOT_FOUND\n.*took too long.*\n.*an answer\n"
        r".*no router answers at 127.0.0.1:1: connection refused\n"
    ),
    "administer.py": (
        r"drained worker-0: 0 requests moved to other workers\nmeanwhile worker-1 answers\nworker-0 takes requests"
    ),
}


def run(name: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("name", SAYS)
def test_the_example_runs_and_says_what_it_promises(name: str, router: str) -> None:
    assert re.search(SAYS[name], run(name, router)), name


def test_a_batch_is_answered_in_the_files_order_and_says_which_row_failed(
    tmp_path: Path, router: str
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": f"def f{number}(", "id": number} for number in range(20)] + [{"prompt": "", "id": 20}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    without_arguments = subprocess.run(
        [sys.executable, str(EXAMPLES / "batch_file.py")], capture_output=True, text=True, timeout=RUN_SECONDS
    )
    assert (without_arguments.returncode, without_arguments.stderr[:6]) == (1, "usage:")
    assert run("batch_file.py", str(source), str(target), router) == "21 prompts, 1 failed\n"
    answered = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [row["id"] for row in answered] == list(range(21))
    assert all(row["tokens"] > 0 for row in answered[:20])
    assert answered[20]["error"] == "INVALID_REQUEST"


@pytest.mark.ci
def test_the_engine_alone_finds_on_its_second_round_what_the_first_has_left() -> None:
    said = run("embedded_engine.py")
    first, second = (int(number) for number in re.findall(r"^round \d: (\d+) of", said, flags=re.MULTILINE))
    assert second > first


def test_every_example_is_tested_here_listed_in_their_readme_and_short() -> None:
    programs = {path.name for path in EXAMPLES.glob("*.py")}
    assert programs == {*SAYS, "batch_file.py", "embedded_engine.py"}
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"]({name})" in listed for name in programs)
    assert all(len((EXAMPLES / name).read_text().splitlines()) < 60 for name in programs)
