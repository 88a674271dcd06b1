"""The profile's parts add up to the step, and a leaf contains everything that runs within it.

A real engine is measured from plan to delivery.
"""

import json
import os
import signal
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blockyard.worker.engine import Engine
from safetensors.torch import load_file

import bench.profile.__main__ as profile_bench
from bench.engine.build import BLOCK_SIZE, EngineSettings, build_engine, engine_request
from bench.engine.peers.protocol import Request
from bench.engine.shapes import DEMO, model_folder
from bench.kernels.timing import Machine
from bench.profile import stopwatch
from bench.profile.decoding import START_STEPS, blocks_of_decodes, decoding
from bench.profile.report import WALKED, Figures, floors_of, text_of
from bench.profile.roofline import DecodeStep, limit_seconds, used_weights
from bench.profile.room import Decode, room_for
from bench.profile.scenarios import (
    PLAN,
    PREPARE,
    medians,
    profile_steps,
    watch_parts,
    whole_workload,
)
from bench.profile.stopwatch import Stopwatch

CHECKPOINT = DEMO / "model.safetensors"
MODEL = model_folder("demo", "float32", Path(), with_weights=True)

MACHINE = Machine(copy_bytes_per_second=1e10, matmul_flops_per_second=1e12)


class Cook:
    """It takes virtual time: a soup two seconds, and a dinner one besides."""

    now = 0.0

    def dinner(self) -> str:
        self.soup()
        self.now += 1.0
        return "served"

    def soup(self) -> None:
        self.now += 2.0


def test_a_part_has_its_time_without_that_of_the_parts_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leaf keeps what is within it, and what is unwrapped is watched no more."""
    cook = Cook()
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: cook.now))
    for is_leaf, seconds in ((False, {"dinner": 1.0, "soup": 2.0}), (True, {"dinner": 3.0})):
        watch = Stopwatch()
        watch.wrap(cook, "dinner", "dinner", is_leaf=is_leaf)
        watch.wrap(cook, "soup", "soup")
        assert cook.dinner() == "served"
        assert watch.seconds == seconds
        assert watch.calls == dict.fromkeys(seconds, 1)
        watch.unwrap()
        cook.soup()
        assert watch.seconds == seconds
        assert set(vars(cook)) <= {"now"}


@pytest.fixture(scope="module")
def engine() -> Engine:
    options = {"dtype": "float32", "device": "cpu", "backend": "torch", "max_model_len": 512}
    return build_engine(EngineSettings(model=str(MODEL), kv_bytes=2**25, **options))


def test_the_parts_of_a_decode_step_add_up_to_it(engine: Engine) -> None:
    with decoding(engine, running=3, context=20, num_steps=9), watch_parts(engine) as watch:
        profile = profile_steps(engine, watch, 4)
    assert not engine.has_work
    assert {PLAN, PREPARE, "commit", "deliver", "sample"} <= profile.keys()
    assert {"forward: attention", "forward: linear 224 -> 384"} <= profile.keys()
    for step in range(4):
        parts = sum(values[step] for part, values in profile.items() if part != "step" and len(values) == 4)
        assert parts <= profile["step"][step] * 1.001
    assert next(iter(medians(profile))) == "step"


def test_decodes_run_in_each_step_in_a_pool_that_just_holds_them_or_the_run_is_refused() -> None:
    """A pool for eight sequences of 70 tokens to the end of 40 steps. A step computes less than a prompt."""
    limits = {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 32}
    needed = blocks_of_decodes(running=8, context=70, num_steps=40, block_size=BLOCK_SIZE)
    options = {"dtype": "float32", "device": "cpu", "kv_bytes": 0, "least_blocks": needed}
    engine = build_engine(EngineSettings(model=str(MODEL), **options, **limits))

    def decode(num_steps: int, *, running: int = 8, beside: int = 0) -> list[int]:
        """Return the tokens that came of each step. `beside` is the prompt of an urgent request meanwhile."""
        with decoding(engine, running=running, context=70, num_steps=40):
            lengths = [len(sequence.tokens) for sequence in engine.scheduler.running]
            assert 70 < min(lengths) <= max(lengths) <= 73
            if beside:
                engine.submit(replace(engine_request(list(range(10, 10 + beside)), 100), priority=-9))
            return [len(engine.step().outputs) for _ in range(num_steps)]

    assert decode(40) == [8] * 40
    for error, given, told in (
        (ValueError, {"running": 9}, r"9 sequences of 70 tokens need 72 blocks .* the KV pool has 64: "),
        (
            RuntimeError,
            {"num_steps": 40 + START_STEPS},
            r"0 of 8 sequences ran .*: 0 were preempted .*, 8 have",
        ),
        (RuntimeError, {"beside": 240}, r"of 8 sequences ran in each of 40 steps.*: [1-8] were preempted"),
    ):
        with pytest.raises(error, match=told):
            decode(**{"num_steps": 40, **given})
        assert not engine.has_work


def test_a_whole_workload_finds_nothing_cached_and_counts_what_names_cost(engine: Engine) -> None:
    requests = [Request(0.0, list(range(10, 60)), 3), Request(0.0, list(range(60, 130)), 5)]
    before = engine.load().cached_tokens
    with watch_parts(engine) as watch:
        courses = [whole_workload(engine, watch, requests) for _ in range(2)]
    assert engine.load().cached_tokens == before
    for course in courses:
        assert 0 < course.naming_seconds + course.look_up_seconds < course.seconds
        assert course.share_of_names < 1


def row(sequences: int, context: int, share: float) -> Figures:
    return {"sequences": sequences, "context": context, "limit_ms": 1.0, "step_ms": 2.0, "share": share}


FULL_COLLECTIONS = {
    "count": 3,
    "spared_ms": 3.0,
    "unspared_ms": 600.0,
    "large_pool_tokens": 2**20,
    "large_pool_ms": 4.0,
}
FIGURES: Figures = {
    "model": "llama-166m",
    "dtype": "float32",
    "backend": "cpu",
    "threads": 2,
    "proven": "9 tests passed",
    "device": "cpu",
    "steps": {},
    "plan_and_prepare_ms": {"steps": 50, "p0": 0.7, "p50": 0.8, "p99": 0.9, "p100": 1.5},
    "names": {"share": 0.02, "naming_ms": 1.0, "look_up_ms": 1.0, "whole_ms": 100.0},
    "collections": {
        "spared": {"count": 2, "longest_ms": 4.0, "whole_ms": 5.0},
        WALKED: {"count": 9, "longest_ms": 6.0, "whole_ms": 9.0},
    },
    "full_collections": FULL_COLLECTIONS,
    "of_roofline": [row(1, 256, 0.1), row(32, 256, 0.9), row(256, 256, 0.7), row(64, 2048, 0.85)],
}


def test_floors_and_text_follow_from_the_figures() -> None:
    """The floor of a whole step is a GPU's and its model's, at each length of context."""
    assert [floor.holds for floor in floors_of(FIGURES)] == [True, False, True]
    for what in ("spared_ms", "large_pool_ms"):
        slow = {**FIGURES, "full_collections": {**FULL_COLLECTIONS, what: 7.0}}
        assert [floor.holds for floor in floors_of(slow)] == [True, False, False]
    assert len(floors_of({**FIGURES, "device": "cuda", "model": "qwen3-0.6b"})) == 3
    floors = floors_of({**FIGURES, "device": "cuda", "model": "llama-3.1-8b"})[3:]
    assert [(floor.value, floor.holds) for floor in floors] == [(0.7, False), (0.85, True)]
    for floor, context in zip(floors, (256, 2048), strict=True):
        assert "llama-3.1-8b" in floor.name
        assert f"sequences of {context} " in floor.name
    text = text_of(FIGURES, "Title.\n\n    command\n\nAbout.")
    for told in (
        "50 steps: p50 0.8 ms, p99 0.9 ms, max 1.5 ms.",
        "longest of 3: as in a worker 3.0 ms, python's own way 600.0 ms",
        "with 1,048,576 tokens in the pool and a simulated model: as in a worker 4.0 ms",
        "| 64 | 2,048 | 2.00 | 1.00 | 85% |",
    ):
        assert told in text


def test_the_limit_of_a_decode_step_is_weights_or_matmuls_and_then_the_cache(engine: Engine) -> None:
    runner: Any = engine.runner
    model = runner.config
    weights = used_weights(model)
    kv_bytes = 2 * 6 * 2 * 32 * 4
    slow_memory = Machine(copy_bytes_per_second=1e9, matmul_flops_per_second=1e18)
    slow_matmul = Machine(copy_bytes_per_second=1e18, matmul_flops_per_second=1e9)
    step = DecodeStep(sequences=2, context_tokens=10)
    assert limit_seconds(step, model, 4, slow_memory) == pytest.approx((4 * weights + 20 * kv_bytes) / 1e9)
    assert limit_seconds(step, model, 4, slow_matmul) == pytest.approx(4 * weights / 1e9)
    assert weights == sum(tensor.numel() for tensor in load_file(CHECKPOINT).values())


DECODES = [Decode(32, 1), Decode(32, 8), Decode(64, 1), Decode(64, 8)]


@pytest.mark.parametrize(
    ("wanted", "max_blocks", "num_blocks", "num_left_out"),
    [
        (0, None, 48, 0),
        (100, None, 100, 0),
        (100, 60, 60, 0),
        (0, 47, 32, 1),
        (40, 36, 36, 1),
        (0, 5, 4, 3),
        (9, 3, 3, 4),
    ],
)
def test_decodes_that_do_not_fit_the_memory_are_left_out(
    wanted: int, max_blocks: int | None, num_blocks: int, num_left_out: int
) -> None:
    room = room_for(DECODES, num_steps=16, wanted_blocks=wanted, max_blocks=max_blocks)
    assert room.num_blocks == num_blocks
    assert len(room.left_out) == num_left_out
    assert sorted([*room.fitting, *room.left_out]) == sorted(DECODES)
    for decode in DECODES:
        needed = blocks_of_decodes(
            running=decode.running, context=decode.context, num_steps=16, block_size=16
        )
        assert (decode in room.fitting) == (needed <= num_blocks)


PROFILE = ["bench.profile", "--model", "demo", "--backend", "torch", "--threads", "1", "--steps", "2"]
PROFILE += ["--contexts", "64,128", "--decodes", "1,16", "--kv-gib", "0", "--skip-proof"]
WEIGHTS_AND_150_BLOCKS = 14_863_744 + 150 * 49_152


def test_a_profile_ended_by_a_signal_reports_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is ended in a step of the engine, after the first decodes. The largest decodes have no room."""
    profile_steps, calls = profile_bench.profile_steps, count(1)

    def ended(engine: Any, *arguments: Any) -> Any:
        if next(calls) > 3:
            monkeypatch.setattr(engine.runner, "start", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        return profile_steps(engine, *arguments)

    monkeypatch.setattr(profile_bench, "profile_steps", ended)
    monkeypatch.setattr(profile_bench, "measure_machine", lambda *_: MACHINE)
    monkeypatch.setattr(profile_bench, "MANY", 16)
    memory = str(WEIGHTS_AND_150_BLOCKS / 2**30)
    monkeypatch.setattr(sys, "argv", [*PROFILE, "--memory-gib", memory, "--output", str(tmp_path)])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="cut short"):
            profile_bench.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    told = capsys.readouterr().out
    assert "left out for lack of memory: 16 sequences of 128 tokens, which need a pool of 0.0 GiB" in told
    assert "\n\n**UNPROVEN: measured without tests (--skip-proof).**\n" in told
    (report,) = tmp_path.glob("*-profile-cut-short-unproven.json")
    figures = json.loads(report.read_text(encoding="utf-8"))["figures"]
    assert (figures["cut_short"], figures["left_out"]) == (True, ["16 sequences of 128 tokens"])
    assert [(row["context"], row["sequences"]) for row in figures["of_roofline"]] == [(64, 1)]
    assert list(figures["steps"]) == ["decode, 1 sequences of 64 tokens"]
    assert "names" not in figures
