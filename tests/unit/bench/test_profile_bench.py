"""The profile's parts add up to the step, and a leaf contains everything that runs within it.

A real engine is measured from plan to delivery.
"""

import gc
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blockyard.proto.runtime.garbage_collection import kept_out_of_garbage_collection
from blockyard.worker.engine import Engine
from safetensors.torch import load_file

from bench.engine.build import BLOCK_SIZE, EngineSettings, build_engine, engine_request
from bench.engine.peers.protocol import Request
from bench.engine.shapes import DEMO, model_folder
from bench.kernels.timing import Machine
from bench.profile import scenarios
from bench.profile.decoding import START_STEPS, blocks_of_decodes, decoding
from bench.profile.report import WALKED, Figures, floors_of, text_of
from bench.profile.roofline import DecodeStep, limit_seconds, used_weights
from bench.profile.scenarios import (
    PLAN,
    PREPARE,
    full_collections_ms,
    large_pool_collection_ms,
    medians,
    prefill_profile,
    profile_steps,
    watch_parts,
    watch_scheduler,
    whole_workload,
)
from bench.profile.stopwatch import Stopwatch

CHECKPOINT = DEMO / "model.safetensors"

SLEEP_SECONDS = 0.02


class Cook:
    def dinner(self) -> str:
        self.soup()
        time.sleep(SLEEP_SECONDS)
        return "served"

    def soup(self) -> None:
        time.sleep(2 * SLEEP_SECONDS)


def test_a_part_has_its_time_without_that_of_the_parts_it_calls() -> None:
    cook, watch = Cook(), Stopwatch()
    watch.wrap(cook, "dinner", "dinner")
    watch.wrap(cook, "soup", "soup")
    started = time.perf_counter()
    assert cook.dinner() == "served"
    assert watch.seconds["soup"] >= 2 * SLEEP_SECONDS
    assert watch.seconds["dinner"] >= SLEEP_SECONDS
    assert sum(watch.seconds.values()) <= time.perf_counter() - started
    assert watch.calls == {"dinner": 1, "soup": 1}


def test_a_leaf_keeps_what_is_within_it() -> None:
    cook, watch = Cook(), Stopwatch()
    watch.wrap(cook, "dinner", "dinner", is_leaf=True)
    watch.wrap(cook, "soup", "soup")
    cook.dinner()
    assert list(watch.seconds) == ["dinner"]
    assert watch.seconds["dinner"] >= 3 * SLEEP_SECONDS


def test_what_is_unwrapped_is_watched_no_more() -> None:
    cook, watch = Cook(), Stopwatch()
    watch.wrap(cook, "soup", "soup")
    watch.unwrap()
    cook.soup()
    assert not watch.seconds
    assert not vars(cook)


@pytest.fixture(scope="module")
def engine() -> Engine:
    model = model_folder("demo", "float32", Path(), with_weights=True)
    settings = EngineSettings(
        model=str(model), dtype="float32", device="cpu", backend="torch", kv_bytes=2**25, max_model_len=512
    )
    return build_engine(settings)


def test_the_parts_of_a_decode_step_add_up_to_it(engine: Engine) -> None:
    with decoding(engine, running=3, context=20, num_steps=9), watch_parts(engine) as watch:
        profile = profile_steps(engine, watch, 4)
    assert not engine.has_work
    wanted = {
        PLAN,
        PREPARE,
        "commit",
        "deliver",
        "sample",
        "forward: attention",
        "forward: linear 224 -> 384",
    }
    assert wanted <= profile.keys()
    for step in range(4):
        parts = sum(values[step] for part, values in profile.items() if part != "step" and len(values) == 4)
        assert parts <= profile["step"][step] * 1.001
    assert next(iter(medians(profile))) == "step"


def test_planning_and_preparing_are_measured_whole(engine: Engine) -> None:
    with decoding(engine, running=3, context=20, num_steps=9), watch_scheduler(engine) as watch:
        profile = profile_steps(engine, watch, 4)
    assert {len(profile[part]) for part in (PLAN, PREPARE, "step")} == {4}
    assert "commit" not in profile


FULL_HOUSE, CONTEXT, PROMISED_STEPS = 8, 70, 40


@pytest.fixture(scope="module")
def full_engine() -> Engine:
    """Its pool holds FULL_HOUSE sequences to the end of PROMISED_STEPS, and no block besides. A step computes less than
    a prompt."""
    needed = blocks_of_decodes(
        running=FULL_HOUSE, context=CONTEXT, num_steps=PROMISED_STEPS, block_size=BLOCK_SIZE
    )
    model = model_folder("demo", "float32", Path(), with_weights=True)
    settings = EngineSettings(
        model=str(model),
        dtype="float32",
        device="cpu",
        kv_bytes=0,
        least_blocks=needed,
        max_model_len=512,
        max_num_seqs=2 * FULL_HOUSE,
        max_num_batched_tokens=4 * FULL_HOUSE,
    )
    return build_engine(settings)


def decode(engine: Engine, num_steps: int, *, running: int = FULL_HOUSE, beside: int = 0) -> list[int]:
    """How many tokens came of each step; `beside` is the prompt of an urgent request that comes meanwhile."""
    with decoding(engine, running=running, context=CONTEXT, num_steps=PROMISED_STEPS):
        if beside:
            engine.submit(replace(engine_request(list(range(10, 10 + beside)), 100), priority=-9))
        return [len(engine.step().outputs) for _ in range(num_steps)]


def test_all_sequences_decode_in_each_step_in_a_pool_that_just_holds_them(full_engine: Engine) -> None:
    assert decode(full_engine, PROMISED_STEPS) == [FULL_HOUSE] * PROMISED_STEPS
    assert not full_engine.has_work


def test_decodes_begin_at_about_one_length_however_slow_prompts_are(
    full_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_engine.mixed_steps, "limit_tokens", 1)
    with decoding(full_engine, running=FULL_HOUSE, context=CONTEXT, num_steps=PROMISED_STEPS):
        lengths = [len(sequence.tokens) for sequence in full_engine.scheduler.running]
        assert full_engine.mixed_steps.limit_tokens == 1
    assert len(lengths) == FULL_HOUSE
    assert CONTEXT < min(lengths) <= max(lengths) <= CONTEXT + 3


def test_decodes_that_the_pool_does_not_hold_to_their_end_are_refused(full_engine: Engine) -> None:
    missing = re.escape(f"{8 * full_engine.bytes_per_block / 2**20:.1f} MiB are missing")
    with pytest.raises(
        ValueError, match=rf"9 sequences of 70 tokens need 72 blocks .* the KV pool has 64: {missing}"
    ):
        decode(full_engine, PROMISED_STEPS, running=FULL_HOUSE + 1)
    assert not full_engine.has_work


@pytest.mark.parametrize(
    ("running", "context", "message"),
    [
        (257, 20, "257 sequences are more than max_num_seqs 256"),
        (3, 490, "of 515 tokens by the end are longer than max_model_len 512"),
    ],
)
def test_decodes_that_the_engine_has_no_room_for_are_refused(
    engine: Engine, running: int, context: int, message: str
) -> None:
    with (
        pytest.raises(ValueError, match=message),
        decoding(engine, running=running, context=context, num_steps=9),
    ):
        pass


def test_sequences_that_end_before_the_last_step_are_told(full_engine: Engine) -> None:
    with pytest.raises(RuntimeError, match=r"0 of 8 sequences ran .*: 0 were preempted .*, 8 have ended"):
        decode(full_engine, PROMISED_STEPS + START_STEPS)
    assert not full_engine.has_work


def test_sequences_that_are_preempted_while_others_decode_are_told(full_engine: Engine) -> None:
    with pytest.raises(
        RuntimeError, match=r"of 8 sequences ran in each of 40 steps.*: [1-8] were preempted .*, 0 have ended"
    ):
        decode(full_engine, PROMISED_STEPS, beside=240)
    assert not full_engine.has_work


def test_each_profiled_prefill_is_of_a_prompt_that_nobody_has_cached(engine: Engine) -> None:
    before = engine.load().cached_tokens
    with watch_parts(engine) as watch:
        profile = prefill_profile(engine, watch, tokens=64, num_steps=3)
    assert len(profile["forward: attention"]) == 3
    assert engine.load().cached_tokens == before


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


def test_floors_are_the_schedulers_names_and_the_collectors() -> None:
    assert [floor.holds for floor in floors_of(FIGURES)] == [True, False, True]
    for what in ("spared_ms", "large_pool_ms"):
        slow = {**FIGURES, "full_collections": {**FULL_COLLECTIONS, what: 7.0}}
        assert [floor.holds for floor in floors_of(slow)] == [True, False, False]


def test_the_floor_of_a_whole_step_is_of_a_gpu_and_its_model_at_each_length_of_context() -> None:
    assert len(floors_of({**FIGURES, "device": "cuda", "model": "qwen3-0.6b"})) == 3
    floors = floors_of({**FIGURES, "device": "cuda", "model": "llama-3.1-8b"})[3:]
    assert [(floor.value, floor.holds) for floor in floors] == [(0.7, False), (0.85, True)]
    assert all("llama-3.1-8b" in floor.name for floor in floors)
    assert ["sequences of 256 " in floors[0].name, "sequences of 2048 " in floors[1].name] == [True, True]


def test_the_report_says_what_is_rare_beside_what_is_usual() -> None:
    text = text_of(FIGURES, "Title.\n\n    command\n\nAbout.")
    assert "50 steps: p50 0.8 ms, p99 0.9 ms, max 1.5 ms." in text
    assert (
        "while 256 sequences decode, longest of 3: as in a worker 3.0 ms, python's own way 600.0 ms" in text
    )
    assert "with 1,048,576 tokens in the pool and a simulated model: as in a worker 4.0 ms" in text
    assert "| 64 | 2,048 | 2.00 | 1.00 | 85% |" in text


@pytest.mark.ci
def test_a_full_collection_is_by_the_wall_clock_and_walks_what_is_spared_only_when_asked_to() -> None:
    class Slow:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            time.sleep(SLEEP_SECONDS)

    held = [Slow()]
    with kept_out_of_garbage_collection():
        held.clear()  # garbage that is spared
        assert full_collections_ms(1)[1] >= 1000 * SLEEP_SECONDS
        assert gc.get_freeze_count()
        Slow()
        assert full_collections_ms(1)[0] >= 1000 * SLEEP_SECONDS


def test_a_large_pool_is_walked_while_its_sequences_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Engine] = []

    def engine_of(*args: Any, **settings: Any) -> Engine:
        engines.append(Engine(*args, **settings))
        return engines[0]

    def look(count: int) -> float:
        (engine,) = engines
        assert [len(sequence.tokens) >= 64 for sequence in engine.scheduler.running] == [True] * 4
        assert engine.pool.num_used >= 4 * 64 // BLOCK_SIZE
        assert gc.get_freeze_count()
        return float(count)

    monkeypatch.setattr(scenarios, "Engine", engine_of)
    monkeypatch.setattr(scenarios, "_longest_collection_ms", look)
    assert large_pool_collection_ms(running=4, context=64, count=7) == 7.0


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
