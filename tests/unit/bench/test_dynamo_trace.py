"""The input that we give Dynamo's simulator, and the checks of its answer. The simulator itself is not needed here."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.peers.dynamo import check_trace, read_answer, run_dynamo

SUMMARY = {
    "completed_requests": 2,
    "prefix_cache_reused_ratio": 0.25,
    "median_ttft_ms": 30.0,
    "p99_ttft_ms": 90.0,
    "duration_ms": 5030.0,
}


def line(*, length: int = 40, ids: int = 3, **more: Any) -> str:
    return json.dumps(
        {"timestamp": 0, "input_length": length, "output_length": 2, "hash_ids": list(range(ids)), **more}
    )


def run(trace: Path, python: Path) -> None:
    run_dynamo(
        trace,
        python=python,
        num_workers=2,
        router_mode="kv",
        block_size=16,
        num_gpu_blocks=100,
        trace_block_tokens=16,
    )


def test_a_trace_may_end_its_prompts_within_a_block() -> None:
    assert check_trace(f"{line(length=48)}\n{line(length=33)}\n", 16) == 2


@pytest.mark.parametrize("length", [32, 49])
def test_a_trace_of_another_block_size_is_refused_with_its_line(length: int) -> None:
    with pytest.raises(ValueError, match=rf"line 2 has 3 hash_ids, but {length} tokens in blocks of 16"):
        check_trace(f"{line()}\n{line(length=length)}", 16)


def test_lines_that_would_wait_for_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="line 1 must have just the fields"):
        check_trace(line(session_id="a"), 16)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no requests"),
        ("not json", "line 1 is not JSON"),
        ("[1]", "line 1 must have just the fields"),
        ('{"timestamp": 0}', "line 1 must have just the fields"),
        (line(length=0), "input_length"),
        (line().replace("40", '"40"'), "input_length"),
        (line().replace("[0, 1, 2]", "3"), "hash_ids"),
    ],
)
def test_what_is_no_trace_is_refused_with_a_sentence(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_trace(text, 16)


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="trace_block_tokens must be at least 1, not 0"):
        check_trace(line(), 0)


def test_the_answer_is_read_by_our_names() -> None:
    result = read_answer(json.dumps({"summary": SUMMARY, "version": "1.6.1"}), 2)
    assert (result.reuse, result.ttft_p50_ms, result.ttft_p99_ms, result.duration_s) == (
        0.25,
        30.0,
        90.0,
        5.03,
    )
    assert result.raw == {**SUMMARY, "version": "1.6.1"}


def test_a_run_that_did_not_serve_everybody_is_no_result() -> None:
    with pytest.raises(ValueError, match="served 2 of 3 requests"):
        read_answer(json.dumps({"summary": SUMMARY, "version": "1.6.1"}), 3)


def test_what_the_peer_refuses_is_said_in_its_words() -> None:
    with pytest.raises(ValueError, match="block_size must be positive"):
        read_answer(json.dumps({"error": "block_size must be positive"}), 2)


def test_an_answer_that_is_no_json_is_an_error() -> None:
    with pytest.raises(ValueError, match="did not answer with JSON: 'Killed'"):
        read_answer("Killed", 2)


def test_a_python_without_dynamo_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line(), encoding="utf-8")
    with pytest.raises(ValueError, match="run_mocker_trace_replay is missing from"):
        run(trace, Path(sys.executable))
    with pytest.raises(ValueError, match="cannot be run: give a Python that has ai-dynamo-runtime"):
        run(trace, tmp_path / "nothing")
