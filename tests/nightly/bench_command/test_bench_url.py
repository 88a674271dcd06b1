"""`bench --url` against our own gateway: it measures the server, and writes the report of all other benchmarks."""

import json
from typing import Any

import pytest
from blockyard.deploy.cli import main
from click.testing import CliRunner, Result

from .conftest import Bench

SMALL = ("--num-requests", "6", "--input-tokens", "40", "--output-tokens", "5")


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OPENAI_API_KEY", "BLOCKYARD_ROUTER", "BLOCKYARD_TOKEN"):
        monkeypatch.delenv(variable, raising=False)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments])


def document(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def keys(value: Any) -> Any:
    """The shape of a document."""
    return {name: keys(inner) for name, inner in value.items()} if isinstance(value, dict) else None


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_both_endpoints_are_measured_by_the_servers_own_count(bench: Bench, endpoint: str) -> None:
    told = document("random", *SMALL, "--url", bench.url, "--endpoint", endpoint)
    assert told["cluster"]["url"] == bench.url
    found = told["results"]["of the server"]
    assert (found["finished"], found["failed"]) == (6, {})
    assert found["output_tokens_per_second"] == pytest.approx(6 * 5 / found["seconds"])
    assert found["input_tokens_per_second"] > 6 * 40 / found["seconds"], "words of several tokens"
    assert 0 < found["ttft_ms"]["p50"] < found["e2el_ms"]["p50"]
    assert found["itl_ms"]["mean"] > 0


def test_tokens_that_the_server_counted_otherwise_than_planned_are_told(bench: Bench) -> None:
    found = document("random", *SMALL, "--url", bench.url)["results"]["of the server"]
    planned, by_server = found["planned_prompt_tokens"], found["prompt_tokens"]
    assert (planned, found["planned_output_tokens"], found["output_tokens"]) == (6 * 40, 6 * 5, 6 * 5)
    assert by_server > planned
    words = run("random", *SMALL, "--url", bench.url).stdout
    assert "the server counted" in words
    assert "the plan has 240 and 30" in words
    ids = ("--url", bench.url, "--vocab-size", "256")
    exact = document("random", *SMALL, *ids)["results"]["of the server"]
    assert exact["prompt_tokens"] == exact["planned_prompt_tokens"] == 240
    assert "the server counted" not in run("random", *SMALL, *ids).stdout
    assert "the server counted" not in bench.run("random", *SMALL).stdout


def test_the_document_has_the_shape_of_that_of_our_own_protocol(bench: Bench) -> None:
    ours = bench.json("random", *SMALL)
    other = document("random", *SMALL, "--url", bench.url)
    workers = other["results"]["of the server"]["workers"]
    assert list(workers) == [bench.url.removeprefix("http://")]
    assert keys(other.pop("results")["of the server"]["ttft_ms"]) == keys(
        ours["results"]["prefix"]["ttft_ms"]
    )
    assert other.keys() == ours.keys() - {"results"}


def test_token_ids_are_as_many_as_planned_and_a_prefix_in_common_is_reused(bench: Bench) -> None:
    load = ("--groups", "2", "--followers", "3", "--prefix-tokens", "256", "--question-tokens", "16")
    pace = ("--output-tokens", "4", "--concurrency", "1", "--vocab-size", "256")
    found = document("shared-prefix", *load, *pace, "--url", f"{bench.url}/v1")["results"]["of the server"]
    assert found["input_tokens_per_second"] == pytest.approx(8 * 272 / found["seconds"])
    assert found["hit_rate"] > 0.5


def test_turns_of_a_chat_have_the_answers_before_them_as_messages(bench: Bench) -> None:
    load = [
        "--sessions",
        "2",
        "--turns",
        "3",
        "--systems",
        "2",
        "--system-tokens",
        "64",
        "--pause-seconds",
        "0.05",
    ]
    found = document("chat", *load, "--url", bench.url, "--endpoint", "chat")["results"]["of the server"]
    assert found["finished"] == 6
    assert found["hit_rate"] > 0.3


def test_what_the_server_refuses_is_counted_by_its_code(bench: Bench) -> None:
    found = document("random", *SMALL, "--url", bench.url, "--model", "another", "--warm-up", "0")
    assert found["results"]["of the server"]["failed"] == {"MODEL_NOT_FOUND": 6}
    late = document("random", *SMALL, "--url", bench.url, "--timeout", "0.03", "--warm-up", "0")
    assert sum(late["results"]["of the server"]["failed"].values()) == 6


def test_a_port_of_grpc_is_named_and_no_key_goes_out_in_plaintext(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "is it a gRPC or a TLS port" in run("random", "--url", f"http://{bench.router}").output
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-somebody")
    refused = run("random", "--url", "http://192.0.2.1:8000")
    assert refused.exit_code == 2
    assert "in plaintext" in refused.output
    assert "sk-of-somebody" not in refused.output
