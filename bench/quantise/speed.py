"""Linear layers of decode steps on a CPU, in full precision and quantised.

    python -m bench.quantise.speed [--threads N]

Weights are 4096 by 4096, and a call passes over so many that no cache holds them. Kinds are measured in turns, and
medians count. The roofline is the memory: the bytes of the numbers with their scales, at the rate of reading a large
tensor, measured in the same turns. W4 has 4.31 bits a weight and W8 8.31, with groups of 128 inputs. Inputs of
both are rounded to 16 bits, and to 8 with `--cpu-linears int8`.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from blockyard.kernels.cpu.backend import CpuBackend
from blockyard.kernels.cpu.extension import load_extension
from blockyard.kernels.cpu.grouped_linear import GroupedWeight
from blockyard.kernels.interface import Backend
from blockyard.kernels.quantised import Int4Weight, Int8Weight, LinearWeight

from bench.proof import prove
from bench.reporting import REPORTS, Floor, write_report

SIZE, GROUP = 4096, 128
CALL_BYTES = 256 << 20
"""Bytes of weights that a call passes over, beyond any last-level cache here."""
ROWS = (1, 4, 16, 64)
TURNS = 15
MIN_SHARE, MIN_GAIN = 0.8, 2.0
PROOF = ("tests/unit/kernels/test_cpu_linears.py",)
READING = "reading"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Weights of one kind, laid out for its backend."""

    name: str
    backend: Backend
    dtype: torch.dtype
    weights: list[LinearWeight]
    num_bytes: int
    """Bytes of one weight."""

    def call(self, rows: int) -> Callable[[], object]:
        x_TI = torch.randn(rows, SIZE).to(self.dtype)
        return lambda: [self.backend.linear(x_TI, weight) for weight in self.weights]


def kinds() -> list[Kind]:
    library = load_extension()
    full, int8 = CpuBackend(library), CpuBackend(library, linears="int8")
    bf16 = torch.bfloat16

    def kind(
        name: str, backend: Backend, make: Callable[[], LinearWeight], dtype: torch.dtype = bf16
    ) -> Kind:
        first = backend.pack_linear(make())
        assert isinstance(first, torch.Tensor | GroupedWeight)
        memory = first.memory if isinstance(first, GroupedWeight) else first
        num_bytes = memory.numel() * memory.itemsize
        count = max(2, CALL_BYTES // num_bytes)
        weights = [first, *(backend.pack_linear(make()) for _ in range(count - 1))]
        return Kind(name=name, backend=backend, dtype=dtype, weights=weights, num_bytes=num_bytes)

    return [
        kind("float32", full, lambda: torch.randn(SIZE, SIZE), torch.float32),
        kind("bfloat16", full, lambda: torch.randn(SIZE, SIZE, dtype=bf16)),
        kind("--cpu-linears int8", int8, lambda: torch.randn(SIZE, SIZE, dtype=bf16)),
        kind("W8", full, _w8),
        kind("W4", full, _w4),
        kind("W4, inputs in int8", int8, _w4),
    ]


def _w4() -> Int4Weight:
    return Int4Weight(
        packed_OI=torch.randint(0, 256, (SIZE, SIZE // 2), dtype=torch.uint8),
        scale_OG=torch.rand(SIZE, SIZE // GROUP),
        zero_OG=torch.full((SIZE, SIZE // GROUP), 8, dtype=torch.uint8),
        group_size=GROUP,
        order_I=None,
        dtype=torch.bfloat16,
    )


def _w8() -> Int8Weight:
    return Int8Weight(
        weight_OI=torch.randint(-127, 128, (SIZE, SIZE), dtype=torch.int8),
        scale_OG=torch.rand(SIZE, SIZE // GROUP),
        zero_OG=None,
        group_size=GROUP,
        order_I=None,
        dtype=torch.bfloat16,
    )


def measure(all_kinds: list[Kind], turns: int) -> tuple[float, dict[tuple[str, int], float]]:
    """Return the bytes read per second, and the seconds of one weight by kind and rows."""
    large = torch.ones(CALL_BYTES // 4, dtype=torch.int32)
    calls = {(kind.name, rows): kind.call(rows) for kind in all_kinds for rows in ROWS}
    calls[READING, 0] = lambda: large.sum(dtype=torch.int32)
    times: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for _ in range(turns):
        for key, call in calls.items():
            started = time.perf_counter()
            call()
            times[key].append(time.perf_counter() - started)
    counts = {kind.name: len(kind.weights) for kind in all_kinds}
    seconds = {key: median(some) / counts[key[0]] for key, some in times.items() if key[0] != READING}
    return CALL_BYTES / min(times[READING, 0]), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, default=REPORTS, help="folder of the report")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=TURNS)
    arguments = parser.parse_args()
    proven = prove(PROOF)
    torch.set_num_threads(arguments.threads)
    all_kinds = kinds()
    rate, seconds = measure(all_kinds, arguments.turns)
    # The reading may itself be slower than a kernel that reads several streams.
    roof = max(rate, *(kind.num_bytes / seconds[kind.name, 1] for kind in all_kinds))
    meaning = (__doc__ or "").rpartition("\n\n")[2].strip()
    lines = [
        f"{meaning} {arguments.threads} threads read {roof / 1e9:.1f} GB/s. {proven}.",
        "",
        "| weights | " + " | ".join(f"{rows} tokens, ms" for rows in ROWS) + " | share of the roofline at 1 |",
        "|---|" + "---|" * (len(ROWS) + 1),
        *(
            f"| {kind.name} | " + " | ".join(f"{seconds[kind.name, rows] * 1e3:.3f}" for rows in ROWS)
            + f" | {kind.num_bytes / roof / seconds[kind.name, 1]:.0%} |"
            for kind in all_kinds
        ),
    ]  # fmt: skip
    by_name = {kind.name: kind for kind in all_kinds}
    path = write_report(
        "quantised-linears",
        title="Quantised linear layers of decode steps on a CPU",
        text="\n".join(lines),
        figures={
            "bytes_per_second": roof,
            "seconds": {f"{name}, {rows}": value for (name, rows), value in seconds.items()},
        },
        floors=[
            Floor(
                name="W4, share of the memory roofline at 1 token",
                value=by_name["W4"].num_bytes / roof / seconds["W4", 1],
                floor=MIN_SHARE,
                better="higher",
            ),
            Floor(
                name="bfloat16 / W4, seconds at 1 token",
                value=seconds["bfloat16", 1] / seconds["W4", 1],
                floor=MIN_GAIN,
                better="higher",
            ),
        ],
        versions={"torch": torch.__version__},
        folder=arguments.output,
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
