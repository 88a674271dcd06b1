"""The command against a real cluster: it sends its plan, and its report matches what the cluster did."""

import json
import time
from pathlib import Path

import pytest
from blockyard.router.client import Client

from .conftest import Bench

SMALL = ("--groups", "2", "--followers", "3", "--prefix-tokens", "256", "--output-tokens", "4")


def test_prompts_that_share_nothing_hit_nothing(bench: Bench) -> None:
    found = bench.results("random", "--num-requests", "12", "--input-tokens", "64", "--output-tokens", "3")
    assert (found["finished"], found["failed"], found["migrations"]) == (12, {}, 0)
    assert found["hit_rate"] == 0
    assert found["output_tokens_per_second"] == pytest.approx(36 / found["seconds"])
    assert found["input_tokens_per_second"] == pytest.approx(12 * 64 / found["seconds"])
    assert sum(share["requests"] for share in found["workers"].values()) == 12
    assert 0 < found["ttft_ms"]["p50"] <= found["e2el_ms"]["p50"] <= found["e2el_ms"]["p99.9"]


def test_followers_reuse_the_prefix_of_their_leader_and_the_index_had_promised_it(bench: Bench) -> None:
    """Requests run one at a time, on the worker with the prefix: 6 followers reuse 256 tokens each, 2 leaders none."""
    found = bench.results(
        "shared-prefix", *SMALL, "--question-tokens", "16", "--concurrency", "1", "--seed", "5"
    )
    assert found["hit_rate"] == pytest.approx(6 * 256 / (8 * 272))
    assert 0 < found["predicted_hit_rate"] <= found["hit_rate"]


def test_a_second_run_of_the_same_seed_finds_the_first_ones_blocks_only_with_a_salt_in_common(
    bench: Bench,
) -> None:
    load = ("shared-prefix", *SMALL, "--concurrency", "1", "--seed", "9")
    fresh = [bench.results(*load)["hit_rate"] for _ in range(2)]
    assert fresh[0] == fresh[1]
    bench.results(*load, "--cache-salt", "both")
    assert bench.results(*load, "--cache-salt", "both")["hit_rate"] > fresh[0] + 0.1


def test_policies_are_compared_in_turns_on_the_same_requests_with_empty_caches(
    bench: Bench, tmp_path: Path
) -> None:
    saved = tmp_path / "result.json"
    compared = [
        "--concurrency",
        "1",
        "--compare",
        "prefix,round_robin",
        "--rounds",
        "2",
        "--slo-ttft-ms",
        "60000",
    ]
    result = bench.run("shared-prefix", *SMALL, *compared, "--save", str(saved))
    assert result.exit_code == 0, result.output
    document = json.loads(saved.read_text())
    prefix, turns = (document["results"][policy] for policy in ("prefix", "round_robin"))
    assert prefix["finished"] == turns["finished"] == 16
    assert prefix["hit_rate"] > turns["hit_rate"] > 0, "by turns each group is computed on both workers"
    assert {name: share["requests"] for name, share in turns["workers"].items()} == {"w0": 8, "w1": 8}
    assert prefix["goodput_per_second"] == prefix["requests_per_second"]
    assert [len(found["rounds"]) for found in (prefix, turns)] == [2, 2]
    assert {"machine", "versions", "seed", "workload", "about"} <= document.keys()
    assert "round_robin" in result.output


def test_turns_of_a_chat_find_what_was_said_before(bench: Bench) -> None:
    load = [
        "--sessions",
        "3",
        "--turns",
        "3",
        "--systems",
        "3",
        "--system-tokens",
        "96",
        "--pause-seconds",
        "0.05",
    ]
    found = bench.results("chat", *load)
    assert found["finished"] == 9
    assert found["hit_rate"] > 0.5


def test_a_trace_is_played_at_its_times_and_shares_its_blocks(bench: Bench, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 160, "output_length": 2, "hash_ids": [1, 2]},
        {"timestamp": 3000, "input_length": 200, "output_length": 2, "hash_ids": [1, 3, 4]},
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    begun = time.monotonic()
    found = bench.results("trace", str(trace), "--speed", "3", "--trace-block-tokens", "96")
    assert time.monotonic() - begun >= 1.0
    assert found["seconds"] >= 1.0
    assert found["hit_rate"] == pytest.approx(96 / 360)


def test_an_open_loop_is_not_slowed_down_by_answers(bench: Bench) -> None:
    """Each answer takes 200 steps of 10 ms, and 30 requests come within a second or so."""
    found = bench.results(
        "random", "--num-requests", "30", "--rate", "30", "--input-tokens", "16", "--output-tokens", "200"
    )
    assert found["finished"] == 30
    answers_one_after_another = 30 * found["e2el_ms"]["mean"] / 1000
    assert found["seconds"] < answers_one_after_another / 3


def test_what_a_router_refuses_is_counted_by_its_reason(bench: Bench) -> None:
    late = [
        "--num-requests",
        "4",
        "--input-tokens",
        "16",
        "--timeout",
        "0.05",
        "--output-tokens",
        "400",
        "--warm-up",
        "0",
    ]
    found = bench.results("random", *late)
    assert found["finished"] == 0
    assert sum(found["failed"].values()) == 4
    assert found["ttft_ms"]["mean"] is None


def test_an_open_and_a_closed_loop_at_once_and_what_does_not_fit_are_refused(
    bench: Bench, tmp_path: Path
) -> None:
    both = bench.run("random", "--rate", "1", "--concurrency", "1")
    assert both.exit_code == 2
    assert "give only one" in both.output
    large = bench.run("random", "--input-tokens", "5000")
    assert large.exit_code == 1
    assert "the model allows at most 2048" in large.output
    trace = tmp_path / "bad.jsonl"
    trace.write_text('{"timestamp": 0}')
    bad = bench.run("trace", str(trace))
    assert bad.exit_code == 1
    assert "bad.jsonl, line 1" in bad.output
    assert bench.run("random", "--compare", "prefix").exit_code == 2
    assert bench.run("random", "--compare", "prefix,nearest").exit_code == 2


def test_warming_up_leaves_no_request_behind_and_is_not_counted(bench: Bench) -> None:
    found = bench.json(
        "random", "--num-requests", "2", "--warm-up", "6", "--input-tokens", "16", "--output-tokens", "2"
    )
    assert found["results"]["prefix"]["finished"] == 2
    with Client(bench.router) as client:
        assert client.list_requests() == []
