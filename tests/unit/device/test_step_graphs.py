"""Decode steps replayed from static buffers give the same tokens as steps launched kernel by kernel.

Under Triton's interpreter a graph calls its computation again. With CUDA the same tests capture and replay real graphs.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from blockyard.kernels.attention import shared_prefix
from blockyard.kernels.attention.shared_prefix import MIN_SHARERS
from blockyard.proto.naming.block_hash import chain
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest
from blockyard.worker.execution.runner import PendingStep, TorchRunner
from blockyard.worker.execution.step_graphs import (
    CudaSteps,
    GraphSizes,
    RepeatedStep,
    StepGraph,
    ladder,
    shared_sizes,
)
from blockyard.worker.scheduling.scheduler import SchedulerConfig
from blockyard.worker.sequences.identifiers import BlockName, RequestId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.step_plan import StepPlan

from tests.unit.worker.checkpoints import reference_greedy, shared_checkpoint
from tests.unit.worker.scheduling import ROOT

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MIN_GAP = 2.5e-4
PROMPTS = [[5, 9, 30], [7] * 17, list(range(40, 60)), [3]]
NUM_TOKENS = 2


class Counting:
    """A graph that tells how often it was replayed."""

    def __init__(self, graph: StepGraph, replays: list[int]) -> None:
        self._graph = graph
        self._replays = replays

    def capture(self, compute: Callable[[], torch.Tensor]) -> None:
        self._graph.capture(compute)

    def replay(self) -> torch.Tensor:
        hidden_TH = self._graph.replay()
        self._replays.append(len(hidden_TH))
        return hidden_TH


class Noting:
    """A graph that tells which of all it is when it is replayed."""

    def __init__(self, graph: StepGraph, key: tuple[int, bool], replayed: list[tuple[int, bool]]) -> None:
        self._graph = graph
        self._key = key
        self._replayed = replayed

    def capture(self, compute: Callable[[], torch.Tensor]) -> None:
        self._graph.capture(compute)

    def replay(self) -> torch.Tensor:
        self._replayed.append(self._key)
        return self._graph.replay()


def checkpoint() -> Path:
    """One layer: the interpreter runs hundreds of programs for each launch of attention, most of them empty."""
    return shared_checkpoint("LlamaForCausalLM", num_hidden_layers=1)


def make_runner(runner_class: type[TorchRunner] = TorchRunner) -> TorchRunner:
    runner = runner_class.create(
        checkpoint(),
        device=DEVICE,
        dtype="float32",
        num_blocks=24,
        block_size=16,
        backend="triton",
    )
    for pool in runner.kv_pools:
        pool.fill_(float("nan"))
    return runner


def capture(runner: TorchRunner, max_rows: int) -> list[int]:
    """The list that the sizes of replayed graphs are put into."""
    replays: list[int] = []
    make_graph: Callable[[], StepGraph] = CudaSteps() if DEVICE.type == "cuda" else RepeatedStep
    rows = ladder(max_rows)
    sizes = GraphSizes(
        make_graph=lambda: Counting(make_graph(), replays),
        rows=rows,
        at_start=rows,
        shared_at_start=shared_sizes(rows),
    )
    runner.capture_decodes(sizes, max_context_tokens=128)
    return replays


def engine_of(runner: TorchRunner, *, overlap: bool) -> Engine:
    config = SchedulerConfig(max_model_len=128, max_num_seqs=8, max_num_batched_tokens=32)
    return Engine(config, runner, num_blocks=24, overlap_steps=overlap)


def submit(engine: Engine, prompt: list[int], num_tokens: int) -> RequestId:
    return engine.submit(
        EngineRequest(
            token_ids=prompt,
            prompt_length=len(prompt),
            names=[BlockName(name) for name in (ROOT, *chain(ROOT, prompt, 16))],
            sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens),
        )
    )


def run(engine: Engine) -> dict[RequestId, list[int]]:
    tokens: dict[RequestId, list[int]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


@pytest.mark.parametrize("max_rows", [1, 2, 5, 8, 9, 100, 256, 300, 1000])
def test_every_batch_has_a_size_that_is_little_larger(max_rows: int) -> None:
    sizes = ladder(max_rows)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == max_rows
    assert len(sizes) < 70
    for rows in range(1, max_rows + 1):
        size = next(size for size in sizes if size >= rows)
        assert size - rows < max(2, 8 if rows <= 256 else 32)


@pytest.mark.ci
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_those_of_transformers(overlap: bool) -> None:
    """Cover batches that fill a graph's size or do not, chunked prompts, and more rows than any graph has."""
    runner = make_runner()
    replays = capture(runner, max_rows=3)
    engine = engine_of(runner, overlap=overlap)
    ids = [submit(engine, prompt, NUM_TOKENS + index) for index, prompt in enumerate(PROMPTS)]
    tokens = run(engine)
    for index, (request_id, prompt) in enumerate(zip(ids, PROMPTS, strict=True)):
        expected = reference_greedy(checkpoint(), tuple(prompt), NUM_TOKENS + index)
        assert expected.min_gap > MIN_GAP, "the reference itself is undecided: choose another prompt"
        assert tokens[request_id] == list(expected.tokens)
    assert {1, 2, 3} >= set(replays) > {1}


@pytest.mark.slow
def test_a_step_that_shares_a_prefix_is_replayed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight chats on one prompt, eight on none, and eight on one again: through graphs of their own."""
    monkeypatch.setattr(shared_prefix, "MIN_SHARED_TOKENS", 32)
    prompt = list(range(40, 73))
    own = [[*prompt, 5 + index] for index in range(MIN_SHARERS)]
    runner = make_runner()
    capture(runner, max_rows=MIN_SHARERS)
    assert runner._graphs is not None
    graphs, replayed = runner._graphs._graphs, list[tuple[int, bool]]()
    for key, graph in graphs.items():
        graphs[key] = Noting(graph, key, replayed)
    engine = engine_of(runner, overlap=False)
    for prompts in (own, [[9 + 2 * index, 30, 7] for index in range(MIN_SHARERS)], own[::-1]):
        ids = [submit(engine, token_ids, NUM_TOKENS) for token_ids in prompts]
        tokens = run(engine)
        for request_id, token_ids in zip(ids, prompts, strict=True):
            expected = reference_greedy(checkpoint(), tuple(token_ids), NUM_TOKENS)
            assert expected.min_gap > MIN_GAP, "the reference itself is undecided: choose another prompt"
            assert tokens[request_id] == list(expected.tokens)
    assert replayed == [(MIN_SHARERS, True), (MIN_SHARERS, False), (MIN_SHARERS, True)]


@pytest.mark.ci
def test_a_capture_writes_no_block() -> None:
    runner = make_runner()
    capture(runner, max_rows=MIN_SHARERS)
    assert all(bool(pool.isnan().all()) for pool in runner.kv_pools)


@pytest.mark.ci
def test_experts_are_replayed_for_whatever_tokens_choose_them() -> None:
    """One layer, whose tokens choose other experts in each step."""
    folder = shared_checkpoint("Qwen3MoeForCausalLM", num_hidden_layers=1)
    runner = TorchRunner.create(
        folder, device=DEVICE, dtype="float32", num_blocks=24, block_size=16, backend="triton"
    )
    replays = capture(runner, max_rows=1)
    engine = engine_of(runner, overlap=False)
    request_id = submit(engine, [3], 3)
    expected = reference_greedy(folder, (3,), 3)
    assert expected.min_gap > MIN_GAP, "the reference itself is undecided: choose another prompt"
    assert run(engine)[request_id] == list(expected.tokens)
    assert replays == [1, 1, 1]


def test_a_model_with_windows_runs_kernel_by_kernel() -> None:
    runner = TorchRunner.create(
        shared_checkpoint("MistralForCausalLM", sliding_window=20),
        device=DEVICE,
        dtype="float32",
        num_blocks=24,
        block_size=16,
        backend="triton",
    )
    replays = capture(runner, max_rows=2)
    engine = engine_of(runner, overlap=False)
    submit(engine, [5] * 3, 3)
    assert len(run(engine)[RequestId(0)]) == 3
    assert not replays


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs CUDA, which says who waits for it")
def test_a_step_is_started_without_waiting_for_the_device() -> None:
    class NeverWaits(TorchRunner):
        def start(self, plan: StepPlan) -> PendingStep:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return super().start(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    runner = make_runner(runner_class=NeverWaits)
    capture(runner, max_rows=4)
    engine = engine_of(runner, overlap=True)
    for prompt in PROMPTS:
        submit(engine, prompt, 8)
    assert all(len(tokens) == 8 for tokens in run(engine).values())
