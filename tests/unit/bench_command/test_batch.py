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
from blockyard.deploy.machine import state
from blockyard.deploy.requests.batch import Counts, answered_ids, read_lines
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.ci
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


def test_a_priority_is_added_where_a_line_names_none() -> None:
    first, second, wrong = read_lines([line("a"), line("b", priority=-3), "nonsense\n"])
    for one, expected in ((first, 100), (second, -3)):
        body = one.with_priority(100).body
        assert body is not None
        assert body["priority"] == expected
    assert (first.with_priority(None), wrong.with_priority(100)) == (first, wrong)


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


def test_a_server_out_of_reach_answers_no_line_and_ends_the_run(files: tuple[Path, Path]) -> None:
    source, target = files
    source.write_text(line("a"))
    result = run(files, "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "no server answers at http://127.0.0.1:1: Connection refused" in result.output
    assert target.read_text() == ""
    target.write_text("what is no answer\n")
    assert "name another file" in run(files, "http://127.0.0.1:1").output
    assert target.read_text() == "what is no answer\n"


def test_the_first_reason_of_a_failure_is_told_on_one_short_line(
    bench: Bench, files: tuple[Path, Path]
) -> None:
    source, target = files
    source.write_text(line("m", model="another") + line("n", url="/v1/x"))
    told = run(files, bench.url, "--concurrency", "1").stderr.splitlines()[-1]
    reason = answers(target)["m"]["error"]["message"]
    assert told == f"first failure: m: {reason}"
    counts = Counts(total=3)
    for custom_id, error in (("a", ""), ("b", "line\nby line " * 100), ("c", "later")):
        counts.count(custom_id, error)
    assert (counts.succeeded, counts.failed) == (1, 2)
    assert counts.first_failure.startswith("b: line by line")
    assert len(counts.first_failure) < 400


def test_a_cluster_without_http_is_told_how_it_gets_it(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = files
    source.write_text(line("a"))
    monkeypatch.setenv(state.HOME_VARIABLE, str(source.parent))
    state.save(state.ClusterState(cluster="default", model="demo", secret="s"))
    result = CliRunner().invoke(main, ["run-batch", "-i", str(source), "-o", str(target)])
    assert result.exit_code == 1
    assert "cluster 'default' serves no HTTP: start it with `serve`" in result.stderr
    assert "gateway" not in result.stderr + CliRunner().invoke(main, ["run-batch", "--help"]).output


@pytest.mark.ci
@given(st.lists(st.sampled_from(["a", "b", "c", None, ""]) | st.text(max_size=3)))
def test_every_line_has_an_id_of_its_own(custom_ids: list[str | None]) -> None:
    texts = [
        json.dumps({"custom_id": custom_id, "url": "/v1/completions", "body": {}}) for custom_id in custom_ids
    ]
    lines = list(read_lines(texts))
    assert len(lines) == len(custom_ids)
    assert len({read.custom_id for read in lines}) == len(lines)
    assert answered_ids(json.dumps({"custom_id": read.custom_id}) for read in lines) == {
        read.custom_id for read in lines
    }
