"""Runs of the kernels' bench: one that is cut short keeps what it has, says so and fails. A complete report stays.

What is measured is in test_kernels_bench.py.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bench.kernels.__main__ as main
from bench.kernels.__main__ import measure
from bench.kernels.cases import cases
from bench.kernels.report import text_of
from bench.proof import Proof

from .test_kernels_bench import BENCH, MACHINE, ROOT, SMALL

COMMAND = (sys.executable, "-m", "bench.kernels", "--device", "cpu", "--backend", "torch", "--threads", "1")


def interrupt() -> Callable[[], object]:
    raise KeyboardInterrupt


@pytest.mark.ci
def test_a_run_cut_short_keeps_what_it_has_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(cases(BENCH, SMALL))[:3]
    monkeypatch.setattr(main, "cases", lambda *_: iter([*whole[:2], replace(whole[2], make=interrupt)]))
    measured = measure(BENCH, lambda: MACHINE, memory_bytes=1 << 30, only="")
    assert (len(measured.rows), measured.is_cut_short) == (2, True)
    figures = {
        "backend": "b",
        "dtype": "d",
        "device_name": "n",
        "skipped": 0,
        "proven": "p",
        "rows": measured.rows,
    }
    figures |= {"machine": {"copy_gb_per_second": 1.0, "matmul_tflops_per_second": 1.0}}
    assert "**Cut short: later cases" in text_of(figures | {"cut_short": True})
    assert "Cut short" not in text_of(figures | {"cut_short": False})
    monkeypatch.setattr(main, "cases", lambda *_: iter([replace(whole[2], make=interrupt)]))
    with pytest.raises(KeyboardInterrupt):
        measure(BENCH, lambda: MACHINE, memory_bytes=1 << 30, only="")


def test_what_a_run_has_told_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended while it prints a line."""
    whole = list(cases(BENCH, SMALL))[:3]
    monkeypatch.setattr(main, "cases", lambda *_: iter(whole))
    monkeypatch.setattr(main, "print", _print_once(), raising=False)
    measured = measure(BENCH, lambda: MACHINE, memory_bytes=1 << 30, only="")
    assert (len(measured.rows), measured.is_cut_short) == (2, True)


def _print_once() -> Callable[..., None]:
    told: list[str] = []

    def once(line: str, **_: object) -> None:
        told.append(line)
        if len(told) > 1:
            raise KeyboardInterrupt

    return once


@pytest.mark.slow
def test_a_run_cut_short_fails_and_leaves_the_complete_report_of_its_day_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, other = list(cases(BENCH, SMALL))[:2]
    options = ["--device", "cpu", "--backend", "torch", "--threads", str(torch.get_num_threads())]
    monkeypatch.setattr(sys, "argv", ["bench.kernels", *options, "--output", str(tmp_path)])
    monkeypatch.setattr(main, "measure_machine", lambda *_: MACHINE)
    monkeypatch.setattr(main, "proof_of", lambda *_, **__: Proof(proven="all"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(main, "cases", lambda *_: iter([one, other]))
    main.main()
    (complete,) = tmp_path.glob("*.json")
    kept = complete.read_text(encoding="utf-8")
    monkeypatch.setattr(main, "cases", lambda *_: iter([one, replace(other, make=interrupt)]))
    with pytest.raises(SystemExit, match="cut short"):
        main.main()
    (short,) = tmp_path.glob("*-kernels-cpu-torch-cut-short.json")
    assert json.loads(short.read_text(encoding="utf-8"))["figures"]["cut_short"]
    assert complete.read_text(encoding="utf-8") == kept


@pytest.mark.slow
def test_the_command_prints_what_it_has_when_it_is_told_to_end_and_fails(tmp_path: Path) -> None:
    options = ("--only", "linear", "--skip-proof", "--output", str(tmp_path))
    with subprocess.Popen([*COMMAND, *options], cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline().endswith(" us\n")
        running.terminate()
        told, _ = running.communicate(timeout=100)
    assert running.returncode == 1
    assert "**Cut short: later cases" in told
    (short,) = tmp_path.glob("*-kernels-cpu-torch-cut-short-unproven.json")
    assert json.loads(short.read_text(encoding="utf-8"))["figures"]["rows"]


@pytest.mark.slow
def test_the_command_prints_each_kernel_beside_the_rates_of_its_own_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--only", "silu", "--memory-gib", "0.01", "--skip-proof", "--output", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "GB/s, matmul" in done.stdout
    assert "## silu_mul, llama-166m" in done.stdout
    assert "left out for lack of memory: llama-166m silu_mul 512 tokens\n" in done.stdout
    (report,) = tmp_path.glob("*.md")
    assert report.read_text(encoding="utf-8").splitlines()[2].startswith("**UNPROVEN: ")
