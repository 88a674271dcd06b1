"""Decode steps that are launched as one graph instead of kernel by kernel, on a ladder of batch sizes.

A graph reads static buffers (static_plan.py): a step is copied there, padded to the next size of the ladder, and the
whole forward pass up to the last norm is replayed. What does not fit runs kernel by kernel: prompts, windows, a shared
prefix that is read once for many, more rows than the ladder has.

Shapes: T tokens in the step, H hidden size.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from blockyard.kernels.attention_plan import AttentionPlan
from blockyard.kernels.static_plan import StaticDecodes
from blockyard.worker.model.decoder import Decoder

logger = logging.getLogger(__name__)
GRAPH_BYTES = 8 << 20
"""Beside its tensors, an estimate for each graph."""
_STEPS_OF_LADDER = ((256, 8), (512, 16))
"""Up to so many rows in steps of so many; beyond them of 32."""


def ladder(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, ... up to `max_rows`, which is the last."""
    sizes = [size for size in (1, 2, 4) if size < max_rows]
    size = 8
    while size < max_rows:
        sizes.append(size)
        size += next((step for end, step in _STEPS_OF_LADDER if size < end), 32)
    return (*sizes, max_rows)


class StepGraph(Protocol):
    """One computation over buffers that stay where they are."""

    def capture(self, compute: Callable[[], torch.Tensor]) -> None:
        """Once. It may run `compute` to try it."""
        ...

    def replay(self) -> torch.Tensor:
        """The same again, with what is in the buffers now. The result is valid until the next replay of any graph."""
        ...


class RecordedStep:
    """Implements `StepGraph` anywhere, by calling again what was captured: gains nothing, and proves the buffers."""

    def __init__(self) -> None:
        self._compute: Callable[[], torch.Tensor] | None = None

    def capture(self, compute: Callable[[], torch.Tensor]) -> None:
        compute()
        self._compute = compute

    def replay(self) -> torch.Tensor:
        assert self._compute is not None
        return self._compute()


class CudaSteps:
    """Makes CUDA graphs whose tensors share one pool of memory: no two of them are replayed at a time."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self) -> "CudaStep":
        return CudaStep(self._pool)


class CudaStep:
    """Implements `StepGraph` on a GPU."""

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool
        self._result: torch.Tensor | None = None

    def capture(self, compute: Callable[[], torch.Tensor]) -> None:
        compute()  # compiles what is compiled at a first launch, and makes workspaces
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, pool=self._pool):
            self._result = compute()

    def replay(self) -> torch.Tensor:
        assert self._result is not None
        self._graph.replay()
        return self._result


class DecodeGraphs:
    """The graphs of one runner. Not thread-safe: one step at a time."""

    def __init__(
        self,
        decoder: Decoder,
        kv_pools: Sequence[torch.Tensor],
        static: StaticDecodes,
        *,
        sizes: Sequence[int],
        make_graph: Callable[[], StepGraph],
        device: torch.device,
    ) -> None:
        """`sizes` rise. The pools must stay where they are."""
        self._decoder = decoder
        self._kv_pools = kv_pools
        self._static = static
        self._sizes = tuple(sizes)
        self._make_graph = make_graph
        self._tokens_T = torch.zeros(self._sizes[-1], dtype=torch.int64, device=device)
        self._places_T = torch.arange(self._sizes[-1], device=device)
        self._graphs: dict[int, StepGraph] = {}

    def capture(self) -> None:
        """All sizes, the largest first, whose memory the others use. All rows are padding: no block is written."""
        for number, size in enumerate(reversed(self._sizes), start=1):
            graph = self._make_graph()
            graph.capture(self._forward(size))
            self._graphs[size] = graph
            if number % 8 == 0 or number == len(self._sizes):
                logger.info("decode graphs: %d of %d captured", number, len(self._sizes))

    def _forward(self, size: int) -> Callable[[], torch.Tensor]:
        tokens_T, places_T, plan = self._tokens_T[:size], self._places_T[:size], self._static.plan(size)
        return lambda: self._decoder.hidden(tokens_T, self._kv_pools, plan, places_T)

    def hidden(self, tokens_T: torch.Tensor, plan: AttentionPlan) -> torch.Tensor | None:
        """[T, H] of all tokens, valid until the next call; None for a step that does not fit."""
        num_rows = plan.num_rows
        if num_rows > self._sizes[-1] or not self._static.takes(plan):
            return None
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        self._static.fill(plan, size)
        self._tokens_T[:num_rows].copy_(tokens_T)
        return self._graphs[size].replay()[:num_rows]
