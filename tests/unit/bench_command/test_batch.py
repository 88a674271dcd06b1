"""`run-batch` and `bench --url` without a server: lines, ids, counts, and what cannot be done has a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
from blockyard.deploy.bench.measures import Sample
from blockyard.deploy.bench.targets import count_usage, text_of
from blockyard.deploy.cli import main
from blockyard.deploy.machine import state
from blockyard.deploy.requests.batch import Counts, answered_ids, read_lines
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OPENAI_API_KEY", "BLOCKYARD_ROUTER", "BLOCKYARD_TOKEN"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def line(custom_id: str, **body: Any) -> str:
    given = {"model": "demo", "prompt": "def f(", "max_tokens": 3, **body}
    return (
        json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": given}) + "\n"
    )


def run(files: tuple[Path, Path], *more: str) -> Result:
    return CliRunner().invoke(main, ["run-batch", "-i", str(files[0]), "-o", str(files[1]), *more])


def test_a_priority_is_added_where_a_line_names_none() -> None:
    first, second, wrong = read_lines([line("a"), line("b", priority=-3), "nonsense\n"])
    for one, expected in ((first, 100), (second, -3)):
        body = one.with_priority(100).body
        assert body is not None
        assert body["priority"] == expected
    assert (first.with_priority(None), wrong.with_priority(100)) == (first, wrong)


def test_a_server_out_of_reach_answers_no_line_and_ends_the_run(files: tuple[Path, Path]) -> None:
    source, target = files
    source.write_text(line("a"))
    result = run(files, "--url", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "no server answers at http://127.0.0.1:1: Connection refused" in result.output
    assert target.read_text() == ""
    target.write_text("what is no answer\n")
    assert "name another file" in run(files, "--url", "http://127.0.0.1:1").output
    assert target.read_text() == "what is no answer\n"


def test_the_first_reason_of_a_failure_is_told_on_one_short_line() -> None:
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


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("--url", "127.0.0.1:8000"), 2, "a server's URL is http://HOST:PORT or https://HOST"),
        (("--url", "http://127.0.0.1:1"), 1, "no server answers at http://127.0.0.1:1: Connection refused"),
        (("--url", "http://host.invalid:80"), 1, "no host of this name is known"),
        (("--url", "http://h:1", "--flush"), 2, "need a cluster's routers: leave out --url"),
        (
            ("--url", "http://h:1", "--compare", "prefix,dynamo"),
            2,
            "need a cluster's routers: leave out --url",
        ),
        (("--url", "http://h:1", "--endpoint", "chat", "--vocab-size", "9"), 2, "chat does not accept"),
        (("--model", "m"), 2, "--endpoint and --vocab-size need --url"),
    ],
)
def test_what_cannot_be_measured_has_a_sentence(arguments: tuple[str, ...], code: int, told: str) -> None:
    result = CliRunner().invoke(main, ["bench", "random", *arguments])
    assert result.exit_code == code
    assert told in result.output


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"choices": [{"text": "a"}]}, "a"),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, ""),
        ({"choices": [{"delta": {"content": "b"}}]}, "b"),
        ({"choices": [{"delta": {"reasoning_content": "c", "content": None}}]}, "c"),
        ({"choices": []}, ""),
        ({"usage": {}}, ""),
    ],
)
def test_text_is_found_in_the_events_of_every_server(event: dict[str, Any], text: str) -> None:
    assert text_of(event) == text


def test_usage_without_details_counts_no_cached_token() -> None:
    sample = Sample(number=0, due=0.0, sent=0.0)
    count_usage(
        {"usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": None}}, sample
    )
    count_usage({"usage": None}, sample)
    assert (sample.prompt_tokens, sample.output_tokens, sample.cached_tokens) == (3, 2, 0)
