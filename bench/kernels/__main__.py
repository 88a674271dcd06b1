"""Benchmark of every kernel against the roofline: bytes, FLOPs, % of copy bandwidth and matmul rate of the same run.

    python -m bench.kernels --device cuda --dtype bfloat16
    python -m bench.kernels --device cpu --dtype float32 --backend torch

ABOUT in report.py describes the cases. Owns the run and its order. Does not own cases, timing or text.
"""

import argparse
import gc
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from statistics import median

import torch

from bench.engine.build import DTYPES, backend_of
from bench.engine.shapes import SHAPES
from bench.kernels.case import Bench, Case
from bench.kernels.cases import CPU, FULL, cases
from bench.kernels.report import ABOUT, OTHERS_OVER_IT, Row, floors_of, text_of
from bench.kernels.timing import Clock, Machine, measure_machine
from bench.plots import draw
from bench.proof import add_proof_options, end_if_unproven, proof_of
from bench.reporting import REPORTS, write_report

ELSEWHERE = ("tests/unit/device/test_sampler.py", "tests/unit/device/test_host_blocks.py")
NOT_OF_A_CPU = ("triton", "compilation", "cpu_extension", "vector_units", "bare_machine")
"""Tests left out on a CPU: those of Triton (its interpreter and compiler take minutes), of builds and of other CPUs."""
PROOFS = {
    "cuda": (("tests/unit/kernels",), ELSEWHERE),
    "cpu": (("tests/unit/kernels", "-k", " and ".join(f"not {name}" for name in NOT_OF_A_CPU)), ELSEWHERE),
}
"""Tests of the kernels, in separate pytest runs: those elsewhere run on one thread."""
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    machine: Machine
    rows: list[Row]
    skipped: int
    """Number of cases left out because they, or one measured in turns with them, did not fit the memory."""
    is_cut_short: bool


def measure(
    bench: Bench, rates: Callable[[], Machine], *, memory_bytes: int, only: str, model: str = ""
) -> Measured:
    """Measure all cases that fit the memory, or those of one model. On KeyboardInterrupt, return those measured until
    then.

    The machine's rates are the higher ones of before and after, because other programs may slow it down for minutes.
    """
    sizes = FULL if bench.device.type == "cuda" else CPU
    if model:
        sizes = replace(sizes, models=(model,), mixtures=())
    every = list(_in_turns(cases(bench, sizes), only))
    fitting = [turns for turns in every if all(case.resident_bytes <= memory_bytes for case in turns)]
    for turns in every:
        if turns not in fitting:
            print(f"left out for lack of memory: {', '.join(_name_of(case) for case in turns)}", flush=True)
    machine, is_cut_short = rates(), False
    timed: list[tuple[Case, float, Row]] = []
    try:
        for case, seconds, others in _timed(bench, fitting):
            timed.append((case, seconds, others))  # Before printing, so that every printed case is kept.
            print(f"{_name_of(case)}: {1e6 * seconds:,.1f} us", flush=True)
        machine = machine.faster(rates())
    except KeyboardInterrupt:
        if not timed:
            raise
        is_cut_short = True
    return Measured(
        machine=machine,
        rows=[row_of(case, seconds, machine) | others for case, seconds, others in timed],
        skipped=sum(map(len, every)) - sum(map(len, fitting)),
        is_cut_short=is_cut_short,
    )


def _name_of(case: Case) -> str:
    return f"{case.model} {case.kernel} {case.shape}"


def _timed(bench: Bench, turns: Iterable[list[Case]]) -> Iterator[tuple[Case, float, Row]]:
    """Yield each case, its median seconds, and the ratios of the other cases in its turns."""
    clock = Clock(bench.device)
    for together in turns:
        times = clock.turns([case.make() for case in together])
        for case, seconds in zip(together, times, strict=True):
            yield case, median(seconds), _others_over(seconds, together, times)
        gc.collect()


def _in_turns(every: Iterator[Case], only: str) -> Iterator[list[Case]]:
    wanted = (case for case in every if only in case.kernel)
    for _, together in groupby(wanted, lambda case: case.turns or (case.model, case.kernel, case.shape)):
        yield list(together)


def _others_over(own: list[float], together: list[Case], times: list[list[float]]) -> Row:
    """Return, by kernel, the times of the other cases divided by a case's own: the median over turns."""
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


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels",
        description=f"{__doc__}\n{ABOUT}",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda")
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--backend", default="auto", help="backend of our kernels")
    parser.add_argument("--only", default="", help="measure only kernels whose name contains this")
    parser.add_argument("--model", default="", choices=SHAPES, help="measure only the shapes of this model")
    parser.add_argument("--memory-gib", type=float, help="default: 60 %% of a GPU's free memory, else 2")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    add_proof_options(parser, default=[], about="further tests that must pass first")
    parser.add_argument("--output", type=Path, default=REPORTS, help="folder of the report")
    parser.add_argument("--name", help="name of the report; default: kernels, or kernels-cpu-BACKEND")
    arguments = parser.parse_args()
    bench = make_bench(arguments.device, arguments.dtype, arguments.backend)
    proof = proof_of(
        [*PROOFS[arguments.device], *([arguments.prove] if arguments.prove else [])],
        device=arguments.device,
        is_skipped=arguments.skip_proof,
        seconds=arguments.proof_seconds,
    )
    torch.set_num_threads(arguments.threads)
    memory_bytes = _memory_bytes(arguments.memory_gib, bench.device)
    with torch.inference_mode():
        # `timeout` sends SIGTERM. Then the report contains the cases measured until then.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        rates = partial(measure_machine, bench.device, bench.dtype)
        measured = measure(
            bench, rates, memory_bytes=memory_bytes, only=arguments.only, model=arguments.model
        )
    figures = {
        "backend": bench.backend.name,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "device_name": _device_name(bench.device),
        "machine": {
            "copy_gb_per_second": round(measured.machine.copy_bytes_per_second / 1e9, 2),
            "matmul_tflops_per_second": round(measured.machine.matmul_flops_per_second / 1e12, 4),
        },
        "proven": proof.proven,
        "skipped": measured.skipped,
        "cut_short": measured.is_cut_short,
        "rows": measured.rows,
    }
    own = "kernels" if bench.device.type == "cuda" else f"kernels-cpu-{bench.backend.name}"
    path = write_report(
        arguments.name or own,
        title="Kernels against the roofline",
        text=text_of(figures),
        figures=figures,
        floors=floors_of(measured.rows, bench.device.type),
        versions=_versions(),
        folder=arguments.output,
        unproven=proof.unproven,
        is_cut_short=measured.is_cut_short,
    )
    print(path.read_text(encoding="utf-8"))
    draw(path)
    if measured.is_cut_short:
        raise SystemExit("cut short: later cases are missing")
    end_if_unproven(proof, is_skipped=arguments.skip_proof)


def make_bench(device_name: str, dtype: str | None, backend: str) -> Bench:
    """Choose the backend and data type. Raise SystemExit for Triton's interpreter."""
    device = torch.device(device_name)
    chosen = backend_of(backend, device)
    if chosen.name == "triton" and device.type != "cuda":
        raise SystemExit("times of Triton's interpreter mean nothing: use a GPU, or a backend of the CPU")
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
