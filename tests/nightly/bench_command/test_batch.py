"""`run-batch` against our own gateway: each line is answered once, through any interruption."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from blockyard.deploy.cli import main
from click.testing import CliRunner, Result

from .conftest import Bench


def line(custom_id: str, *, url: str = "/v1/completions", **body: Any) -> str:
    given = {"model": "demo", "prompt": "def f(", "max_tokens": 3, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": given}) + "\n"


def chat(custom_id: str) -> str:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    return (
        json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})
        + "\n"
    )


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    for variable in ("OPENAI_API_KEY", "BLOCKYARD_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def run(files: tuple[Path, Path], url: str, *more: str) -> Result:
    return CliRunner().invoke(
        main, ["run-batch", "-i", str(files[0]), "-o", str(files[1]), "--url", url, *more]
    )


def answers(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(text) for text in path.read_text().splitlines()]
    by_id = {answer["custom_id"]: answer for answer in found}
    assert len(by_id) == len(found), "each once"
    return by_id


def test_both_endpoints_are_answered_and_a_wrong_line_is_an_error_with_its_id(
    bench: Bench, files: tuple[Path, Path]
) -> None:
    source, target = files
    wrong = ["nonsense\n", "[]\n", "{}\n", line("a"), line("u", url="/v1/x"), line("s", stream=True)]
    source.write_text(line("a") + chat("b") + "\n" + line("m", model="another") + "".join(wrong))
    result = run(files, bench.url)
    assert result.exit_code == 1
    assert "2 answered, 7 failed, 0 skipped" in result.stderr
    assert "first failure: " in result.stderr
    found = answers(target)
    assert found["a"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert found["b"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert (found["a"]["error"], found["a"]["response"]["status_code"]) == (None, 200)
    assert (found["m"]["error"]["code"], found["m"]["response"]["status_code"]) == ("model_not_found", 404)
    assert found["u"]["error"]["message"].startswith("url must be one of /v1/completions")
    assert {"line 5", "line 6", "line 7", "a (line 8)"} < found.keys()
    before = target.read_text()
    assert "0 answered, 0 failed, 9 skipped" in run(files, bench.url).stderr
    assert target.read_text() == before


def test_the_first_reason_of_a_failure_is_told_on_one_short_line(
    bench: Bench, files: tuple[Path, Path]
) -> None:
    source, target = files
    source.write_text(line("m", model="another") + line("n", url="/v1/x"))
    told = run(files, bench.url, "--concurrency", "1").stderr.splitlines()[-1]
    reason = answers(target)["m"]["error"]["message"]
    assert told == f"first failure: m: {reason}"


def test_a_run_that_was_interrupted_goes_on_where_it_ended(bench: Bench, files: tuple[Path, Path]) -> None:
    source, target = files
    source.write_text("".join(line(f"r{number}", max_tokens=20) for number in range(40)))
    command = [
        sys.executable,
        "-m",
        "blockyard.deploy.cli",
        "run-batch",
        "-i",
        str(source),
        "-o",
        str(target),
    ]
    options = ("--url", bench.url, "--concurrency", "2")
    with subprocess.Popen([*command, *options], env=dict(os.environ), stderr=subprocess.PIPE) as process:
        while not (target.exists() and target.read_text().count("\n") >= 4):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 1
    first = target.read_text()
    assert 4 <= first.count("\n") < 40
    with target.open("a") as file:
        file.write('{"custom_id": "r39", "respo')
    result = run(files, bench.url)
    assert result.exit_code == 0, result.output
    assert target.read_text().startswith(first)
    assert set(answers(target)) == {f"r{number}" for number in range(40)}
