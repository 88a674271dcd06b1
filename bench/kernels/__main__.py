"""Every kernel against the roofline: bytes, FLOPs, % of the copy bandwidth and matmul rate of the same run.

    python -m bench.kernels --device cuda --dtype bfloat16
    python -m bench.kernels --device cpu --dtype float32 --backend torch

On a GPU over the heads of Llama-3.1-8B and Qwen3-0.6B/8B/14B; 1 to 256 sequences of 128 to 32k tokens; prefills of 128
to 32k. On a CPU over less. Cases beyond --memory-gib are skipped and counted. Triton's interpreter is refused: its
times say nothing. `Roofline` is the time that the slower of the two, bytes at the copy bandwidth or FLOPs at the matmul
rate, would take at least, over the time it took.
"""

import argparse
import gc
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.engine.build import DTYPES, backend_of
from bench.kernels.attention_cases import CASCADE, ONE_BY_ONE
from bench.kernels.case import Bench, Case
from bench.kernels.cases import CPU, FULL, cases
from bench.kernels.plot import draw
from bench.kernels.timing import Clock, Machine, measure_machine
from bench.proof import prove
from bench.reporting import REPORTS, Floor, write_report

ELSEWHERE = ("tests/worker/test_sampler.py", "tests/worker/test_host_blocks.py")
NOT_OF_A_CPU = ("triton", "compilation", "cpu_extension", "vector_units", "bare_machine")
"""Tests of Triton's kernels, whose interpreter and compiler take minutes, of building, and of other machines."""
PROOFS = {
    "cuda": (("tests/kernels",), ELSEWHERE),
    "cpu": (("tests/kernels", "-k", " and ".join(f"not {name}" for name in NOT_OF_A_CPU)), ELSEWHERE),
}
"""Tests of what is measured, in runs of their own: those elsewhere run on one thread."""
GIB = 2**30
LARGE_READ_BYTES = 64 << 20
DECODE_FLOOR = 0.85
LONE_DECODE_FLOOR = 0.75
LONE_CONTEXT = "decode 1 x 32768"
PREFILL_FLOOR_FLOPS = 400e12
PREFILL_SHAPE = "prefill 8192"
DECODE, PREFILL = "decode attention", "prefill attention"
"""Over pools in the data type."""
CASCADE_FLOOR = 5.0
CASCADE_SHAPE = "decode 64 x (8192 shared + 256)"
CLIFF = 1.5
"""16 sequences may take so many times what 8 take, for each sequence, and no more."""
OTHERS_OVER_IT = "others_over_it"
CUT_SHORT = " **Cut short: later cases are missing, and floors are of those that are there.**"
Row = dict[str, Any]


@dataclass(slots=True)
class Measured:
    rows: list[Row] = field(default_factory=list)
    skipped: int = 0
    """Cases that did not fit the memory."""
    is_cut_short: bool = False


def measure(bench: Bench, machine: Machine, *, memory_bytes: int, only: str) -> Measured:
    """A row for each case that fits; those that are there where KeyboardInterrupt ends it."""
    measured = Measured()
    try:
        _measure(bench, machine, memory_bytes, only, measured)
    except KeyboardInterrupt:
        if not measured.rows:
            raise
        measured.is_cut_short = True
    return measured


def _measure(bench: Bench, machine: Machine, memory_bytes: int, only: str, measured: Measured) -> None:
    clock = Clock(bench.device)
    for together in _in_turns(cases(bench, FULL if bench.device.type == "cuda" else CPU), only):
        if any(case.resident_bytes > memory_bytes for case in together):
            measured.skipped += len(together)
            continue
        times = clock.turns([case.make() for case in together])
        for case, seconds in zip(together, times, strict=True):
            row = row_of(case, median(seconds), machine)
            measured.rows.append(row | _others_over(seconds, together, times))
            print(f"{case.model} {case.kernel} {case.shape}: {row['us']:,.1f} us", flush=True)
        gc.collect()


def _in_turns(every: Iterator[Case], only: str) -> Iterator[list[Case]]:
    wanted = (case for case in every if only in case.kernel)
    for _, together in groupby(wanted, lambda case: case.turns or (case.model, case.kernel, case.shape)):
        yield list(together)


def _others_over(own: list[float], together: list[Case], times: list[list[float]]) -> Row:
    """How many times as long the others take, if any, by their kernels: the median of the turns' ratios."""
    ratios = {
        case.kernel: round(median(other / mine for other, mine in zip(seconds, own, strict=True)), 4)
        for case, seconds in zip(together, times, strict=True)
        if seconds is not own
    }
    return {OTHERS_OVER_IT: ratios} if ratios else {}


def row_of(case: Case, seconds: float, machine: Machine) -> Row:
    copy = case.num_bytes / machine.copy_bytes_per_second
    matmul = case.flops / machine.matmul_flops_per_second
    return {
        "kernel": case.kernel,
        "model": case.model,
        "shape": case.shape,
        "bytes": case.num_bytes,
        "flops": case.flops,
        "us": round(1e6 * seconds, 2),
        "of_copy": round(copy / seconds, 4),
        "of_matmul": round(matmul / seconds, 4),
        "of_roofline": round(max(copy, matmul) / seconds, 4),
    }


def floors_of(rows: list[Row], device: str) -> list[Floor]:
    """The goals are a large GPU's."""
    if device != "cuda":
        return []
    llama = [row for row in rows if row["model"] == "llama-3.1-8b"]
    plain = [row for row in llama if row["kernel"] == DECODE]
    decodes = [row for row in plain if row["shape"] != LONE_CONTEXT]
    large = [row["of_copy"] for row in decodes if row["bytes"] >= LARGE_READ_BYTES]
    lone = [row["of_copy"] for row in plain if row["shape"] == LONE_CONTEXT]
    prefills = [row for row in llama if (row["kernel"], row["shape"]) == (PREFILL, PREFILL_SHAPE)]
    prefill = [row["flops"] / row["us"] * 1e6 / 1e12 for row in prefills]
    cliffs = _cliffs(decodes)
    cascades = [ratio for row, ratio in _cascades(llama) if row["shape"] == CASCADE_SHAPE]
    known = (
        ("decode attention, launches that read 64 MB or more, least % of copy", large, DECODE_FLOOR, min),
        ("decode attention, one sequence of 32k, of copy", lone, LONE_DECODE_FLOOR, min),
        ("prefill attention, 8k causal, TFLOP/s", prefill, PREFILL_FLOOR_FLOPS / 1e12, min),
        (
            "cascade, 64 sequences of 8k shared and 256 own tokens, time without over with",
            cascades,
            CASCADE_FLOOR,
            min,
        ),
    )
    floors = [
        Floor(name=name, value=worst(values), floor=floor, better="higher")
        for name, values, floor, worst in known
        if values
    ]
    if cliffs:
        floors.append(
            Floor(
                name="decode, time of 16 sequences over 8, twice",
                value=max(cliffs),
                floor=CLIFF,
                better="lower",
            )
        )
    return floors


def _cliffs(decodes: list[Row]) -> list[float]:
    """Of long contexts: what 16 sequences take over twice what 8 take."""
    times = {row["shape"]: row["us"] for row in decodes}
    return [
        times[f"decode 16 x {context}"] / (2 * times[f"decode 8 x {context}"])
        for context in (8192, 32768)
        if f"decode 16 x {context}" in times and f"decode 8 x {context}" in times
    ]


def _cascades(rows: list[Row]) -> list[tuple[Row, float]]:
    """Rows of the cascade, and how many times as long the same decodes take each by itself."""
    return [
        (row, row[OTHERS_OVER_IT][ONE_BY_ONE])
        for row in rows
        if row["kernel"] == CASCADE and ONE_BY_ONE in row.get(OTHERS_OVER_IT, {})
    ]


def text_of(figures: dict[str, Any]) -> str:
    assert __doc__ is not None
    about = __doc__.partition("\n\n")[2].partition("\n\n")[2].strip()
    machine = figures["machine"]
    kernels = dict.fromkeys((row["model"], row["kernel"]) for row in figures["rows"])
    return "\n\n".join(
        [
            about,
            f"Kernel backend {figures['backend']}, {figures['dtype']}, on {figures['device_name']}. Copy "
            f"{machine['copy_gb_per_second']:,.0f} GB/s, matmul {machine['matmul_tflops_per_second']:.3g} TFLOP/s. "
            f"{len(figures['rows'])} cases, {figures['skipped']} skipped for their memory. "
            f"Proven before: {figures['proven']}.{CUT_SHORT if figures['cut_short'] else ''}",
            *_cascade_table(figures["rows"]),
            *(_table(model, kernel, figures["rows"]) for model, kernel in kernels),
        ]
    )


def _cascade_table(rows: list[Row]) -> list[str]:
    lines = [f"| {row['model']} | {row['shape']} | {ratio:.2f} |" for row, ratio in _cascades(rows)]
    if not lines:
        return []
    about = (
        "Of the same decodes, in turns, the median turn. The torch backend has none; with many threads a CPU "
        "keeps few decodes apart."
    )
    head = "| model | decodes | time without / with cascade |\n|---|---|---|"
    return ["\n".join(["## What a cascade gains", "", about, "", head, *lines])]


def _table(model: str, kernel: str, rows: list[Row]) -> str:
    own = [row for row in rows if (row["model"], row["kernel"]) == (model, kernel)]
    lines = [
        f"| {row['shape']} | {row['us']:,.1f} | {row['bytes'] / 1e6:,.2f} | {row['flops'] / 1e9:,.3f} "
        f"| {row['of_copy']:.0%} | {row['of_matmul']:.0%} | {row['of_roofline']:.0%} |"
        for row in own
    ]
    head = "| shape | us | MB | GFLOP | of copy | of matmul | of roofline |\n|---|---|---|---|---|---|---|"
    middle = median(row["of_roofline"] for row in own)
    return "\n".join([f"## {kernel}, {model}", "", f"Median {middle:.0%} of the roofline.", "", head, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda")
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--backend", default="auto", help="of our kernels")
    parser.add_argument("--only", default="", help="kernels whose name has this in it")
    parser.add_argument("--memory-gib", type=float, help="default: 60 %% of a GPU's free memory, else 2")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prove", nargs="*", default=[], help="tests that must pass first too")
    parser.add_argument("--skip-proof", action="store_true", help="measure without tests, and keep no report")
    parser.add_argument("--output", type=Path, default=REPORTS, help="folder of the report")
    parser.add_argument("--name", help="of the report; default: kernels, or kernels-cpu-BACKEND")
    arguments = parser.parse_args()
    bench = make_bench(arguments.device, arguments.dtype, arguments.backend)
    proven = "nothing" if arguments.skip_proof else proof_of(arguments.device, arguments.prove)
    torch.set_num_threads(arguments.threads)
    memory_bytes = _memory_bytes(arguments.memory_gib, bench.device)
    with torch.inference_mode():
        machine = measure_machine(bench.device, bench.dtype)
        signal.signal(
            signal.SIGTERM, signal.default_int_handler
        )  # `timeout` leaves what was measured until then
        measured = measure(bench, machine, memory_bytes=memory_bytes, only=arguments.only)
    figures = {
        "backend": bench.backend.name,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "device_name": _device_name(bench.device),
        "machine": {
            "copy_gb_per_second": round(machine.copy_bytes_per_second / 1e9, 2),
            "matmul_tflops_per_second": round(machine.matmul_flops_per_second / 1e12, 4),
        },
        "proven": proven,
        "skipped": measured.skipped,
        "cut_short": measured.is_cut_short,
        "rows": measured.rows,
    }
    if arguments.skip_proof:
        print(text_of(figures))
        return
    path = write_report(
        arguments.name or ("kernels" if bench.device.type == "cuda" else f"kernels-cpu-{bench.backend.name}"),
        title="Kernels against the roofline",
        text=text_of(figures),
        figures=figures,
        floors=floors_of(measured.rows, bench.device.type),
        versions=_versions(),
        folder=arguments.output,
    )
    print(path.read_text(encoding="utf-8"))
    draw(figures, path.with_suffix(".png"))


def proof_of(device: str, others: Sequence[str]) -> str:
    return "; ".join(prove(tests) for tests in (*PROOFS[device], others) if tests)


def make_bench(device_name: str, dtype: str | None, backend: str) -> Bench:
    """Raises SystemExit under Triton's interpreter."""
    device = torch.device(device_name)
    chosen = backend_of(backend, device)
    if chosen.name == "triton" and device.type != "cuda":
        raise SystemExit(
            "Triton's interpreter measures nothing: kernels are timed on a GPU, or on a CPU's backends"
        )
    name = dtype or ("bfloat16" if device.type == "cuda" else "float32")
    return Bench(backend=chosen, device=device, dtype=DTYPES[name])


def _memory_bytes(gib: float | None, device: torch.device) -> int:
    if gib is not None:
        return int(gib * GIB)
    return int(0.6 * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 2 * GIB


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"


def _versions() -> dict[str, str]:
    known = {}
    for package in ("torch", "triton"):
        try:
            known[package] = version(package)
        except PackageNotFoundError:
            continue
    return known


if __name__ == "__main__":
    main()
