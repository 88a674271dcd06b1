"""Scenarios of the profile: any steps, prefill steps, and a whole workload with block names and garbage collection.

Owns driving the engine, and the choice of functions that are parts. Does not own the accounting (stopwatch.py) or
steady decodes (decoding.py).
"""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Any

import torch
from blockyard.kernels.cpu.native_linear import LANES
from blockyard.proto.runtime.garbage_collection import kept_out_of_garbage_collection
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest, SequenceOutput, StepResult
from blockyard.worker.scheduling.scheduler import SchedulerConfig
from blockyard.worker.simulated.runner import SimulatedRunner

from bench.engine.build import BLOCK_SIZE, engine_request
from bench.engine.peers.protocol import Request
from bench.profile.decoding import START_STEPS, blocks_of_decodes, decoding
from bench.profile.stopwatch import Stopwatch

NAMING, LOOK_UP = "name blocks", "look names up"
PLAN, PREPARE = "plan", "prepare"
OPERATIONS = (
    "embed",
    "attention",
    "write_kv",
    "qk_norm_rope_write",
    "rotary",
    "rms_norm",
    "add_rms_norm",
    "silu_mul",
    "copy_blocks",
)
WARM_STEPS = 2
Profile = dict[str, list[float]]
"""Milliseconds of each part, step by step. `step` is the whole."""


@contextmanager
def watch_scheduler(engine: Engine) -> Iterator[Stopwatch]:
    """Measure planning and preparing as wholes only. Measuring a function within them costs a microsecond per call."""
    runner: Any = engine.runner
    watch = Stopwatch()
    watch.wrap(engine.scheduler, "plan", PLAN)
    watch.wrap(runner._inputs, "arrays", PREPARE)
    watch.wrap(runner, "_inputs_of", PREPARE)
    with _one_by_one(engine):
        yield watch
    watch.unwrap()


@contextmanager
def _one_by_one(engine: Engine) -> Iterator[None]:
    """Run steps one after the other, and kernel by kernel. Overlapping steps and graphs have no separate parts."""
    runner: Any = engine.runner
    before = engine.steps.overlap, runner.replays_graphs
    engine.steps.overlap = runner.replays_graphs = False
    yield
    engine.steps.overlap, runner.replays_graphs = before


@contextmanager
def watch_parts(engine: Engine) -> Iterator[Stopwatch]:
    """Measure each part of the engine's steps inside the `with` block, down to each operation of the forward pass."""
    runner: Any = engine.runner
    is_cuda = runner.device.type == "cuda"
    watch = Stopwatch(torch.cuda.synchronize) if is_cuda else Stopwatch()
    watch.wrap(engine.scheduler, "plan", PLAN)
    watch.wrap(engine.scheduler, "commit", "commit")
    watch.wrap(engine.scheduler.tables, "name_full_blocks", NAMING)
    watch.wrap(engine.scheduler.tables, "match", LOOK_UP)
    watch.wrap(runner._inputs, "arrays", PREPARE)
    watch.wrap(runner, "_inputs_of", PREPARE)
    watch.wrap(runner._sampler, "start", "sample", is_leaf=True)
    watch.wrap(runner._decoder, "hidden", "forward: between operations")
    for operation in OPERATIONS:
        if hasattr(runner.backend, operation):
            watch.wrap(runner.backend, operation, f"forward: {operation}", is_leaf=True)
    watch.wrap(runner.backend, "linear", _linear_label, is_leaf=True)
    with _one_by_one(engine):
        yield watch
    watch.unwrap()


def _linear_label(x_TI: torch.Tensor, weight_OI: torch.Tensor, *_: object) -> str:
    outputs = len(weight_OI) * (LANES if weight_OI.dim() > 2 else 1)  # Our own kernels group outputs.
    return f"forward: linear {x_TI.shape[1]} -> {outputs}"


class Delivery:
    """Delivery of a step's outputs to one router, as a worker does it: columns, and their bytes.

    Does nothing without protobuf.
    """

    def __init__(self) -> None:
        try:
            from blockyard.worker.session.outbox import Outbox
        except ImportError:
            self._outbox = None
        else:
            self._outbox = Outbox()

    def deliver(self, outputs: Sequence[SequenceOutput], engine: Engine) -> None:
        if self._outbox is None:
            return
        for output in outputs:
            self._outbox.add(int(output.request_id), output)
        for message in self._outbox.take(engine.load()):
            message.SerializeToString()


def profile_steps(engine: Engine, watch: Stopwatch, num_steps: int) -> Profile:
    """Run `num_steps` steps, and return the time of each part in each step."""
    profile: Profile = {}
    delivery = Delivery()
    for number in range(WARM_STEPS + num_steps):
        watch.reset()
        started = time.perf_counter()
        with watch.part("the engine's own"):
            result: StepResult = engine.step()
        with watch.part("deliver"):
            delivery.deliver(result.outputs, engine)
        elapsed = time.perf_counter() - started
        if number < WARM_STEPS:
            continue
        for part, seconds in {**watch.seconds, "step": elapsed}.items():
            profile.setdefault(part, []).append(1000 * seconds)
    return profile


def prefill_profile(engine: Engine, watch: Stopwatch, *, tokens: int, num_steps: int) -> Profile:
    """Profile steps that each prefill one prompt of `tokens` tokens, without cache hits."""
    chance = Random(tokens)
    profile: Profile = {}
    for _ in range(num_steps):
        engine.submit(_request(chance, tokens, 1))
        for part, values in _one_step(engine, watch).items():
            profile.setdefault(part, []).extend(values)
        while engine.has_work:
            engine.step()
    return profile


def _one_step(engine: Engine, watch: Stopwatch) -> Profile:
    watch.reset()
    started = time.perf_counter()
    with watch.part("the engine's own"):
        engine.step()
    elapsed = time.perf_counter() - started
    return {part: [1000 * seconds] for part, seconds in {**watch.seconds, "step": elapsed}.items()}


def _request(chance: Random, num_tokens: int, max_tokens: int) -> EngineRequest:
    """Make a request whose block names are unique."""
    tokens = [chance.randrange(10, 4000) for _ in range(num_tokens)]
    return engine_request(tokens, max_tokens, salt=str(time.perf_counter_ns()))


@dataclass(slots=True, kw_only=True)
class Course:
    """Times of a whole workload."""

    seconds: float = 0.0
    naming_seconds: float = 0.0
    """Time to name prompts on arrival, which routers do in a cluster, and to name blocks as they fill."""
    look_up_seconds: float = 0.0
    collections_ms: list[float] = field(default_factory=list)
    """Wall-clock time of each garbage collection."""

    @property
    def share_of_names(self) -> float:
        return (self.naming_seconds + self.look_up_seconds) / self.seconds


def whole_workload(engine: Engine, watch: Stopwatch, requests: Sequence[Request]) -> Course:
    """Run all requests at once, without cache hits, and return the times."""
    course = Course()
    watch.reset()
    with _collections(course.collections_ms):
        started = time.perf_counter()
        with watch.part(NAMING):
            submitted = [
                engine_request(request.token_ids, request.max_tokens, salt=str(started))
                for request in requests
            ]
        for request in submitted:
            engine.submit(request)
        while engine.has_work:
            engine.step()
        course.seconds = time.perf_counter() - started
    course.naming_seconds = watch.seconds[NAMING]
    course.look_up_seconds = watch.seconds[LOOK_UP]
    return course


@contextmanager
def _collections(durations_ms: list[float]) -> Iterator[None]:
    started = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal started
        if phase == "start":
            started = time.perf_counter()
        else:
            durations_ms.append(1000 * (time.perf_counter() - started))

    gc.callbacks.append(note)
    try:
        yield
    finally:
        gc.callbacks.remove(note)


def full_collections_ms(count: int) -> tuple[float, float]:
    """Return the longest of `count` full garbage collections in ms: with frozen objects left out, and with them.

    The caller must have frozen its objects. They are frozen again at the end.
    """
    frozen_ms = _longest_collection_ms(count)
    gc.unfreeze()
    try:
        return frozen_ms, _longest_collection_ms(count)
    finally:
        gc.freeze()


def large_pool_collection_ms(*, running: int, context: int, count: int) -> float:
    """Return the ms of the longest of `count` full collections while `running` sequences of `context` tokens decode.

    Only the objects of scheduler, pool and prefix cache exist, frozen as in a worker. The model is simulated.
    """
    num_steps = 1
    num_blocks = blocks_of_decodes(
        running=running, context=context, num_steps=num_steps, block_size=BLOCK_SIZE
    )
    runner = SimulatedRunner(
        vocab_size=4000, prefill_tokens_per_second=1.0, step_seconds=0.0, sleep=lambda seconds: None
    )
    with kept_out_of_garbage_collection():
        config = SchedulerConfig(
            block_size=BLOCK_SIZE,
            max_num_seqs=running,
            max_num_batched_tokens=running * context,
            max_model_len=context + START_STEPS + num_steps,
        )
        engine = Engine(config, runner, num_blocks=num_blocks)
        with decoding(engine, running=running, context=context, num_steps=num_steps):
            engine.step()
            return _longest_collection_ms(count)


def _longest_collection_ms(count: int) -> float:
    durations_ms: list[float] = []
    with _collections(durations_ms):
        for _ in range(count):
            gc.collect()
    return max(durations_ms)


def medians(profile: Profile) -> dict[str, float]:
    """Return the median of each part, largest first. A part counts as 0 in steps that did not have it."""
    steps = len(profile["step"])
    values = {part: [*of, *[0.0] * (steps - len(of))] for part, of in profile.items()}
    rows = {part: round(median(of), 3) for part, of in values.items()}
    return dict(sorted(rows.items(), key=lambda row: -row[1]))
