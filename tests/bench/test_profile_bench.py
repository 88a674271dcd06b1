"""The profile: its parts add up to the step, a leaf keeps what is within it, and a real engine is watched from plan to
delivery."""

import time
from pathlib import Path
from typing import Any

import pytest
from blockyard.worker.engine import Engine
from safetensors.torch import load_file

from bench.engine.build import EngineSettings, build_engine
from bench.engine.peers.protocol import Request
from bench.engine.shapes import DEMO, model_folder
from bench.kernels.timing import Machine
from bench.profile.report import floors_of
from bench.profile.roofline import DecodeStep, limit_seconds, used_weights
from bench.profile.scenarios import (
    PLAN,
    PREPARE,
    decoding,
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


def test_each_profiled_prefill_is_of_a_prompt_that_nobody_has_cached(engine: Engine) -> None:
    before = engine.load().cached_tokens
    with watch_parts(engine) as watch:
        profile = prefill_profile(engine, watch, tokens=64, num_steps=3)
    assert len(profile["forward: attention"]) == 3
    assert engine.load().cached_tokens == before


def test_a_whole_workload_finds_nothing_cached_and_counts_what_names_cost(engine: Engine) -> None:
    requests = [Request(0.0, list(range(10, 60)), 3), Request(0.0, list(range(60, 130)), 5)]
    with watch_parts(engine) as watch:
        courses = [whole_workload(engine, watch, requests) for _ in range(2)]
    assert engine.load().cached_tokens == 0
    for course in courses:
        assert 0 < course.naming_seconds + course.look_up_seconds < course.seconds
        assert course.share_of_names < 1


def test_floors_are_the_schedulers_names_and_the_collectors() -> None:
    figures = {
        "plan_and_prepare_ms": {"p50": 0.8},
        "names": {"share": 0.02},
        "collections": {"spared": {"longest_ms": 4.0}},
        "device": "cpu",
        "of_roofline": {"1": {"share": 0.1}, "32": {"share": 0.9}, "256": {"share": 0.7}},
    }
    assert [floor.holds for floor in floors_of(figures)] == [True, False, True]
    assert (floors_of({**figures, "device": "cuda"})[-1].value) == 0.7


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
