"""Step graphs: decode steps of some batch sizes, launched as one graph instead of kernel by kernel.

A graph reads static buffers (kernels/attention/static_plan.py). A step is copied there, padded to the next available
size, and the whole forward pass up to the last norm is replayed. Other steps run kernel by kernel: prompts, windows,
and more rows than the largest size. Steps that read a shared prefix once for many decodes have graphs of their own.

On a GPU the sizes are a ladder, and all graphs are captured before the first request. On a CPU a graph is the recorded
calls of its kernels. A padded row costs as much there as any other, so every number of rows is a size, captured at its
first use.

Shapes: T tokens in the step, H hidden size.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from blockyard.kernels.attention.plan import AttentionPlan
from blockyard.kernels.attention.shared_prefix import MIN_SHARERS
from blockyard.kernels.attention.static_plan import StaticDecodes
from blockyard.kernels.cpu.backend import CpuBackend, RecordedStep
from blockyard.kernels.cpu.recording import Arena, NotRecordable
from blockyard.kernels.interface import Backend
from blockyard.kernels.lora import StaticLora
from blockyard.worker.execution.capture_progress import CaptureProgress
from blockyard.worker.model.decoder import Decoder
from blockyard.worker.model.lora import LoraLayer, LoraStep

logger = logging.getLogger(__name__)
GRAPH_BYTES = 8 << 20
"""Estimated memory of each graph beside its tensors."""
_STEPS_OF_LADDER = ((256, 8), (512, 16))
"""Pairs (rows, step): up to this many rows the sizes grow by this step, beyond the last pair by 32."""
MAX_CPU_ROWS = 64
"""Largest graph on a CPU. With more rows, the Python between kernels is a small share of a step's time."""


def ladder(max_rows: int) -> tuple[int, ...]:
    """Return graph sizes in rows: 1, 2, 4, 8, 16, 24, ... up to `max_rows`, which is the last."""
    sizes = [size for size in (1, 2, 4) if size < max_rows]
    size = 8
    while size < max_rows:
        sizes.append(size)
        size += next((step for end, step in _STEPS_OF_LADDER if size < end), 32)
    return (*sizes, max_rows)


def shared_sizes(rows: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes with enough rows to share a prefix."""
    return tuple(size for size in rows if size >= MIN_SHARERS)


class StepGraph(Protocol):
    """One computation over buffers with fixed addresses."""

    def capture(self, compute: Callable[[], torch.Tensor]) -> None:
        """Capture the computation, once. It may run `compute` to try it."""
        ...

    def replay(self) -> torch.Tensor:
        """Run the captured computation on the buffers' present content.

        The result is valid until the next replay of any graph.
        """
        ...


class RepeatedStep:
    """Implements `StepGraph` anywhere by calling the captured function again. It saves no time, but tests the
    buffers."""

    def __init__(self) -> None:
        self._compute: Callable[[], torch.Tensor] | None = None

    def capture(self, compute: Callable[[], torch.Tensor]) -> None:
        compute()
        self._compute = compute

    def replay(self) -> torch.Tensor:
        assert self._compute is not None
        return self._compute()


class CudaSteps:
    """Makes CUDA graphs with tensors in one memory pool. No two of them are replayed at a time."""

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


class CpuSteps:
    """Makes recordings of C++ kernels with tensors in one arena. No two of them are replayed at a time."""

    def __init__(self, backend: CpuBackend) -> None:
        self._backend = backend
        self._arena = Arena()

    def __call__(self) -> "CpuStep":
        return CpuStep(self._backend, self._arena)


class CpuStep:
    """Implements `StepGraph` on a CPU. `capture` raises NotRecordable where other code than the C++ kernels computes,
    or where the recording fails for a reason of its own, such as memory. It raises ValueError for a plan that is not
    valid."""

    def __init__(self, backend: CpuBackend, arena: Arena) -> None:
        self._backend = backend
        self._arena = arena
        self._recorded: RecordedStep | None = None

    def capture(self, compute: Callable[[], torch.Tensor]) -> None:
        try:
            self._recorded = self._backend.record(compute, self._arena)
        except (NotRecordable, ValueError):
            raise
        except Exception as error:
            raise NotRecordable(f"the recording failed: {error!r}") from error

    def replay(self) -> torch.Tensor:
        assert self._recorded is not None
        return self._recorded.replay()


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """Numbers of rows for which a graph is captured, and the way to capture one."""

    make_graph: Callable[[], StepGraph]
    rows: tuple[int, ...]
    """Rows of each graph, in rising order."""
    at_start: tuple[int, ...]
    """Sizes captured before the first request. The others are captured at their first use."""
    shared_at_start: tuple[int, ...] = ()
    """Sizes captured before the first request for steps with items over a shared prefix in their plans."""


def sizes_for(backend: Backend, device: torch.device, max_rows: int) -> GraphSizes | None:
    """Return the sizes for a backend and a device, or None where nothing can be captured."""
    if device.type == "cuda" and backend.name == "triton":
        rows = ladder(max_rows)
        return GraphSizes(
            make_graph=CudaSteps(), rows=rows, at_start=rows, shared_at_start=shared_sizes(rows)
        )
    if isinstance(backend, CpuBackend):
        rows = tuple(range(1, min(max_rows, MAX_CPU_ROWS) + 1))
        return GraphSizes(make_graph=CpuSteps(backend), rows=rows, at_start=(1,))
    return None


class DecodeGraphs:
    """The graphs of one runner. Not thread-safe: one step at a time."""

    def __init__(
        self,
        decoder: Decoder,
        kv_pools: Sequence[torch.Tensor],
        static: StaticDecodes,
        *,
        sizes: GraphSizes,
        device: torch.device,
        lora_layers: tuple[LoraLayer, ...] | None = None,
    ) -> None:
        """The pools must keep their addresses, and so must the slots of `lora_layers`. Steps with adapters have graphs
        of their own."""
        self._decoder = decoder
        self._kv_pools = tuple(kv_pools)
        self._static = static
        self._sizes = sizes
        self._tokens_T = torch.zeros(sizes.rows[-1], dtype=torch.int64, device=device)
        self._lora_layers = lora_layers
        self._lora = None if lora_layers is None else StaticLora(sizes.rows[-1], device)
        self._graphs: dict[tuple[int, bool], StepGraph | None] = {}
        """None for a size whose steps cannot be recorded. So are the graphs of steps with adapters."""
        self._lora_graphs: dict[tuple[int, bool], StepGraph | None] = {}

    def capture(self) -> None:
        """Capture the graphs of `at_start` and `shared_at_start`, the largest first: the others reuse its memory.

        All rows are padding: no block is written. Raises NotRecordable where one of them cannot be recorded.
        """
        graphs = [(size, True) for size in self._sizes.shared_at_start]
        graphs += [(size, False) for size in self._sizes.at_start]
        with_adapters = (False,) if self._lora_layers is None else (False, True)
        with CaptureProgress(len(graphs) * len(with_adapters)) as progress:
            for size, is_shared in sorted(graphs, reverse=True):
                for has_adapters in with_adapters:
                    graph = self._captured(size, is_shared, has_adapters=has_adapters)
                    self._graphs_of(has_adapters=has_adapters)[size, is_shared] = graph
                    progress.advance()

    def _graphs_of(self, *, has_adapters: bool) -> dict[tuple[int, bool], StepGraph | None]:
        return self._lora_graphs if has_adapters else self._graphs

    def _graph(self, size: int, is_shared: bool, *, has_adapters: bool) -> StepGraph | None:
        """Return the graph, captured at its first use, or None where it cannot be recorded."""
        graphs = self._graphs_of(has_adapters=has_adapters)
        if (size, is_shared) not in graphs:
            try:
                graphs[size, is_shared] = self._captured(size, is_shared, has_adapters=has_adapters)
            except NotRecordable as error:
                logger.warning("decode graphs: none of %d rows, %s", size, error)
                graphs[size, is_shared] = None
        return graphs[size, is_shared]

    def _captured(self, size: int, is_shared: bool, *, has_adapters: bool) -> StepGraph:
        tokens_T, plan = self._tokens_T[:size], self._static.plan(size, is_shared=is_shared)
        lora = None
        if has_adapters:
            assert self._lora_layers is not None
            assert self._lora is not None
            lora = LoraStep(layers=self._lora_layers, plan=self._lora.plan(size))
        graph = self._sizes.make_graph()
        graph.capture(lambda: self._decoder.hidden(tokens_T, self._kv_pools, plan, None, lora=lora))
        return graph

    def hidden(
        self, tokens_T: torch.Tensor, plan: AttentionPlan, lora: LoraStep | None = None
    ) -> torch.Tensor | None:
        """Return [T, H] of all tokens, valid until the next call, or None for a step that does not fit or cannot be
        recorded."""
        num_rows, rows = plan.num_rows, self._sizes.rows
        if num_rows > rows[-1] or not self._static.takes(plan):
            return None
        size = rows[bisect_left(rows, num_rows)]
        self._static.fill(plan, size)
        self._tokens_T[:num_rows].copy_(tokens_T)
        if lora is not None:
            assert self._lora is not None
            self._lora.fill(lora.plan, size)
        graph = self._graph(size, len(plan.shared_items_Y5) > 0, has_adapters=lora is not None)
        return None if graph is None else graph.replay()[:num_rows]
