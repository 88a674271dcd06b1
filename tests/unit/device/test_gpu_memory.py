"""GPU memory left for KV: the arithmetic on measured sizes, and the step that measures them."""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from blockyard.kernels.attention.shared_prefix import MIN_SHARERS
from blockyard.worker.config import EngineConfig
from blockyard.worker.execution.runner import TorchRunner
from blockyard.worker.execution.step_graphs import GRAPH_BYTES, ladder
from blockyard.worker.execution.warm_up_rows import largest_rows
from blockyard.worker.memory.gpu_memory import MemoryUse, measure
from blockyard.worker.memory.host_blocks import STAGING_BYTES
from blockyard.worker.startup.pool_size import measured_budget

from tests.unit.worker.checkpoints import shared_checkpoint
from tests.unit.worker.steps import NEAR_GAP, execute, make_runner, make_sequence, row_of
from tests.unit.worker.token_engines import greedy, prompt_of

GIB = 2**30
USE = MemoryUse(total=80 * GIB, foreign=2 * GIB, resident=16 * GIB, step=6 * GIB)


def test_the_pool_gets_what_utilization_leaves_beside_everything_else() -> None:
    assert USE.for_pool(0.9, later=GIB) == 72 * GIB - 25 * GIB
    assert USE.for_pool(1.0, later=0) == 56 * GIB
    for name in ("foreign", "resident", "step"):
        more = dataclasses.replace(USE, **{name: getattr(USE, name) + 3 * GIB})
        assert USE.for_pool(0.8, later=0) - more.for_pool(0.8, later=0) == 3 * GIB


def test_where_nothing_is_left_the_error_says_what_takes_how_much_and_what_to_change() -> None:
    with pytest.raises(
        ValueError, match=r"weights 16\.00, the largest step 6\.00.*take 1\.00 more"
    ) as caught:
        USE.for_pool(0.3, later=GIB)
    assert "--gpu-memory-utilization 0.3 gives 24.00" in str(caught.value)
    assert "--max-num-batched-tokens" in str(caught.value)


class Allocations:
    """Implements `Meter` over allocations that steps make on paper."""

    def __init__(self) -> None:
        self.now = 10
        self._peak = 0
        self.cached = 3

    def take(self, size: int) -> None:
        self.now += size
        self._peak = max(self._peak, self.now)

    def taken(self) -> tuple[int, int]:
        return self.reserved() + 7, 100

    def reserved(self) -> int:
        return self.now + self.cached

    def allocated(self) -> int:
        return self.now

    def forget_peak(self) -> None:
        self._peak = self.now

    def peak(self) -> int:
        return self._peak


def test_what_only_the_first_step_takes_and_keeps_is_resident() -> None:
    meter = Allocations()
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        kept = 5 if steps == 1 else 0
        meter.take(20 + kept)
        meter.take(-20)

    assert measure(meter, step) == MemoryUse(total=100, foreign=7, resident=15, step=20)


@pytest.mark.parametrize(
    ("num_tokens", "num_sequences", "longest"),
    [(64, 8, 512), (64, 64, 512), (65, 8, 512), (100, 1, 30), (7, 3, 512)],
)
def test_the_largest_step_has_all_tokens_and_no_fewer_rows_than_may_run(
    num_tokens: int, num_sequences: int, longest: int
) -> None:
    rows = largest_rows(num_tokens, num_sequences, block_size=16, max_row_tokens=longest)
    assert sum(row.num_tokens for row in rows) == num_tokens
    assert len(rows) >= num_sequences
    assert all(row.samples and 0 < row.num_tokens <= longest for row in rows)
    assert len({row.sequence.sequence_id for row in rows}) == len(rows)


def one_block(**settings: Any) -> TorchRunner:
    return make_runner(shared_checkpoint("LlamaForCausalLM"), device="cpu", num_blocks=1, **settings)


def test_a_runner_measured_on_one_block_serves_on_the_pool_it_gets_then() -> None:
    runner, prompt = one_block(), prompt_of(40)
    runner.run_largest_step(200, 12)
    assert len(runner._sampler.state) == 0
    runner.allocate_pools(8, 2)
    assert [len(pool) for pool in runner.kv_pools] == [8] * 3
    assert runner.host_blocks is not None
    found = execute(runner, row_of(make_sequence(prompt, (6, 1, 7)))).tokens
    assert found == greedy(shared_checkpoint("LlamaForCausalLM"), prompt, 1, NEAR_GAP)


def test_the_largest_step_computes_an_adapter_where_any_is_served() -> None:
    runner = one_block(max_loras=1)
    runner.run_largest_step(64, 4)
    assert runner.adapters is not None
    assert list(runner.adapters._held) == [0]


class Fixed(Allocations):
    """A device on which the largest step takes 20 bytes of a hundred GiB."""

    def taken(self) -> tuple[int, int]:
        return self.reserved() + 7, 100 * GIB

    def peak(self) -> int:
        return self.now + 20


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_graphs_are_left_room_where_there_will_be_any(enforce_eager: bool) -> None:
    config = EngineConfig(
        model="any", max_num_seqs=16, max_num_batched_tokens=64, enforce_eager=enforce_eager
    )
    runner, rows = one_block(), ladder(16)
    partials = runner.split_bounds.partial_bytes(16, runner.config.head_dim)
    num_graphs = len(rows) + len([size for size in rows if size >= MIN_SHARERS])
    graphs = 0 if enforce_eager else GRAPH_BYTES * num_graphs + 20 * 16 // 64
    largest_step = partial(runner.run_largest_step, 64, 16)
    left = measured_budget(runner, config, Fixed(), largest_step)
    assert left == int(0.9 * 100 * GIB) - 7 - 10 - 20 - STAGING_BYTES - partials - graphs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_what_cuda_says_adds_up() -> None:
    from blockyard.worker.memory.gpu_memory import CudaMeter

    device = torch.device("cuda:0")
    meter = CudaMeter(device)
    kept: list[torch.Tensor] = []

    def step() -> None:
        if not kept:
            kept.append(torch.empty(32 << 20, dtype=torch.uint8, device=device))
        torch.empty(64 << 20, dtype=torch.uint8, device=device)

    use = measure(meter, step)
    assert use.step == 64 << 20
    assert use.resident >= 32 << 20
    assert 0 < use.foreign < use.total
