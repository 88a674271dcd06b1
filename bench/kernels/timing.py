"""Timing of calls, alone or in turns, and the machine's copy bandwidth and matmul rate in the same run.

On a GPU, CUDA events measure the replay of a call that a CUDA graph has captured, as decode steps are served. The
last-level cache is filled with other data before. On a CPU, the wall clock measures; large cases have inputs far larger
than its caches. Owns no case.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

MIN_CALLS = 5
MAX_CALLS = 200
TARGET_SECONDS = 0.3
"""Target duration of the calls of one case. Slow calls still run MIN_CALLS times."""
FLUSH_BYTES = 256 << 20
"""Size of the data that fill a GPU's last-level cache before each call: several times its size."""
COPY_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
MATMUL_SIZE = {"cuda": 8192, "cpu": 2048}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates of the machine, measured in this run. Percentages of a row refer to them."""

    copy_bytes_per_second: float
    """Sum of read and written bytes per second of a large copy."""
    matmul_flops_per_second: float

    def faster(self, other: "Machine") -> "Machine":
        """Return, for each rate, the higher one of this measurement and `other`."""
        return Machine(
            copy_bytes_per_second=max(self.copy_bytes_per_second, other.copy_bytes_per_second),
            matmul_flops_per_second=max(self.matmul_flops_per_second, other.matmul_flops_per_second),
        )


class Clock:
    """Measures seconds of calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = torch.zeros(FLUSH_BYTES // 4, device=device) if device.type == "cuda" else None

    def seconds(
        self,
        call: Callable[[], object],
        pick: Callable[[Iterable[float]], float] = median,
        *,
        replays: bool = True,
    ) -> float:
        (times,) = self.turns([call], replays=replays)
        return pick(times)

    def turns(self, calls: Sequence[Callable[[], object]], *, replays: bool = True) -> list[list[float]]:
        """Return the seconds of each call in each turn. The order rotates from turn to turn."""
        for call in calls:
            call()  # Let it compile, pack and reserve memory.
        if replays and self._flush is not None:
            calls = [replayed(call) for call in calls]
        longest = max(self._once(call) for call in calls)
        # An odd number, so that the median is one turn's: the median ratio of a to b is then the inverse of b to a.
        num_turns = min(MAX_CALLS, max(MIN_CALLS, int(TARGET_SECONDS / max(longest, 1e-6)))) | 1
        times: list[list[float]] = [[] for _ in calls]
        for turn in range(num_turns):
            for number in range(len(calls)):
                which = (turn + number) % len(calls)
                times[which].append(self._once(calls[which]))
        return times

    def _once(self, call: Callable[[], object]) -> float:
        if self._flush is None:
            started = time.perf_counter()
            call()
            return time.perf_counter() - started
        fill_cache(self._flush)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


def replayed(call: Callable[[], object]) -> Callable[[], object]:
    """Return the replay of a captured call. Launches by Python would take longer than small kernels.

    A call that waits for the GPU cannot be captured, and is returned as it is.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return call
    return graph.replay


def fill_cache(values: torch.Tensor) -> None:
    """Fill the last-level cache by reading. Written values would stay there until the next call pays to move them."""
    values.sum()


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measure the rates by the fastest call. Other programs may slow calls down, but a limit is the best possible.

    The copy is no replay: in a CUDA graph of an H100 the same copy moved 2.45 TB/s, and 3.02 TB/s as a launch.
    """
    clock = Clock(device)
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / clock.seconds(lambda: target.copy_(source), min, replays=False)
    size = MATMUL_SIZE[device.type]
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty(size, size, device=device, dtype=dtype)
    return Machine(
        copy_bytes_per_second=copy,
        matmul_flops_per_second=2 * size**3 / clock.seconds(lambda: torch.mm(left, right, out=out), min),
    )
