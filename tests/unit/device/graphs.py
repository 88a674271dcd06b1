"""Graphs of Triton's decode steps that note their replays, and what tests check of them.

Under the interpreter a graph calls its computation again, and some checks take 20 seconds of CPU time:
tests/nightly/device runs those. With CUDA all of them capture and replay real graphs in tests/unit/device.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.kernels.attention import shared_prefix
from blockyard.kernels.attention.shared_prefix import MIN_SHARERS
from blockyard.worker.engine import Engine
from blockyard.worker.execution.runner import TorchRunner
from blockyard.worker.execution.step_graphs import (
    CudaSteps,
    GraphSizes,
    RepeatedStep,
    StepGraph,
    ladder,
    shared_sizes,
)

from tests.unit.worker.checkpoints import shared_checkpoint
from tests.unit.worker.recording import PROMPTS, engine_on
from tests.unit.worker.steps import DEVICE, NEAR_GAP, spoil
from tests.unit.worker.token_engines import greedy, run, submit

NUM_TOKENS = 2


class Noting:
    """A graph that notes its number and its rows whenever it is replayed."""

    def __init__(self, graph: StepGraph, replays: list[tuple[int, int]], number: int) -> None:
        self._graph, self._replays, self._number = graph, replays, number
        self.capture = graph.capture

    def replay(self) -> torch.Tensor:
        hidden_TH = self._graph.replay()
        self._replays.append((self._number, len(hidden_TH)))
        return hidden_TH


def checkpoint(architecture: str = "LlamaForCausalLM", **overrides: Any) -> Path:
    """One layer: the interpreter runs hundreds of programs for each launch of attention, most of them empty."""
    return shared_checkpoint(architecture, **({"num_hidden_layers": 1} | overrides))


def make_runner(folder: Path, runner_class: type[TorchRunner] = TorchRunner) -> TorchRunner:
    runner = runner_class.create(
        folder, device=DEVICE, dtype="float32", num_blocks=24, block_size=16, backend="triton"
    )
    spoil(runner.kv_pools)
    return runner


def capture(runner: TorchRunner, max_rows: int) -> list[tuple[int, int]]:
    """Return the list of what is replayed: the number of the graph, in the order of captures, and its rows."""
    make_graph: Callable[[], StepGraph] = CudaSteps() if DEVICE.type == "cuda" else RepeatedStep
    replays: list[tuple[int, int]] = []
    numbers, rows = count(), ladder(max_rows)
    sizes = GraphSizes(
        make_graph=lambda: Noting(make_graph(), replays, next(numbers)),
        rows=rows,
        at_start=rows,
        shared_at_start=shared_sizes(rows),
    )
    runner.capture_decodes(sizes, max_context_tokens=128)
    assert all(bool(pool.isnan().all()) for pool in runner.kv_pools), "a capture has written a block"
    return replays


def check(engine: Engine, folder: Path, wanted: Sequence[tuple[Sequence[int], int]]) -> None:
    """Check that prompts get as many greedy tokens as wanted, all at once."""
    ids = [submit(engine, prompt, num_tokens) for prompt, num_tokens in wanted]
    answers = run(engine)
    for request_id, (prompt, num_tokens) in zip(ids, wanted, strict=True):
        assert answers[request_id][0] == greedy(folder, prompt, num_tokens, NEAR_GAP)


def check_tokens(overlap: bool, prompts: Sequence[Sequence[int]] = PROMPTS, max_rows: int = 3) -> None:
    """Cover batches that fill a graph's size or do not, chunked prompts, and more rows than any graph has."""
    runner = make_runner(checkpoint())
    replays = capture(runner, max_rows)
    wanted = [(prompt, NUM_TOKENS + index) for index, prompt in enumerate(prompts)]
    check(engine_on(runner, overlap_steps=overlap), checkpoint(), wanted)
    sizes = {rows for _, rows in replays}
    assert sizes <= {*range(1, max_rows + 1)}
    assert len(sizes) >= min(2, max_rows)


def check_that_a_step_with_a_shared_prefix_is_replayed_too() -> None:
    """Eight chats on one prompt, eight on none, and eight on one again: through graphs of their own."""
    shared = tuple(range(40, 73))
    sharing = [((*shared, 5 + index), NUM_TOKENS) for index in range(MIN_SHARERS)]
    apart = [((9 + 2 * index, 30, 7), NUM_TOKENS) for index in range(MIN_SHARERS)]
    runner = make_runner(checkpoint())
    replays = capture(runner, max_rows=MIN_SHARERS)
    engine = engine_on(runner)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prefix, "MIN_SHARED_TOKENS", 32)
        for wanted in (sharing, apart, sharing[::-1]):
            check(engine, checkpoint(), wanted)
    # The first two that are captured have the most rows: one for steps with a shared prefix, and one for others.
    assert replays == [(0, MIN_SHARERS), (1, MIN_SHARERS), (0, MIN_SHARERS)]


def check_that_experts_are_replayed_for_whatever_tokens_choose_them() -> None:
    """One layer, whose tokens choose other experts in each step."""
    folder = checkpoint("Qwen3MoeForCausalLM")
    runner = make_runner(folder)
    replays = capture(runner, max_rows=1)
    check(engine_on(runner), folder, [((3,), 3)])
    assert [rows for _, rows in replays] == [1, 1, 1]


CHECKS = {
    "tokens": partial(check_tokens, overlap=False),
    "tokens of steps that overlap": partial(check_tokens, overlap=True),
    "a shared prefix": check_that_a_step_with_a_shared_prefix_is_replayed_too,
    "experts": check_that_experts_are_replayed_for_whatever_tokens_choose_them,
}
