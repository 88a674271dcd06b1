"""Benchmarks on a GPU fit its memory, and SIGTERM leaves a report of what they measured until then."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bench.engine.__main__ as engine_bench
import bench.profile.__main__ as profile_bench
from bench.engine.peers.protocol import Course, Request
from bench.engine.systems import System, Trial
from bench.kernels.timing import Machine
from bench.profile.decoding import blocks_of_decodes
from bench.profile.room import Decode, room_for

RATES = Machine(copy_bytes_per_second=1e10, matmul_flops_per_second=1e12)
TRIAL = Trial(
    courses=(Course(submitted=0.0, first=0.5, last=1.0, num_tokens=10),), foreign_cores=0.0, cores=1.0
)


def end_by_signal(after: int) -> Callable[..., Awaitable[Trial]]:
    """Run trials, and send this process SIGTERM in place of the one after these."""
    calls = count(1)

    async def run(_: Sequence[Request]) -> Trial:
        if next(calls) > after:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        return TRIAL

    return run


@pytest.mark.parametrize(("num_runs", "kept"), [(4, 1), (5, 1), (6, 2)])
def test_a_run_ended_by_a_signal_keeps_the_repeats_that_all_systems_ended(
    num_runs: int, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two systems run the warm-up, and then each repeat."""
    run, ended = end_by_signal(num_runs), list[str]()

    @asynccontextmanager
    async def running(system: System, *_: object) -> AsyncIterator[Any]:
        try:
            yield SimpleNamespace(run=run, versions={}, notes="", load_seconds=0.0)
        finally:
            ended.append(system.name)

    monkeypatch.setattr(engine_bench, "running", running)
    monkeypatch.setattr(sys, "argv", ["bench.engine", "--workloads", "tiny,brief"])
    systems = [System(name=name, command=("x",), settings={}, is_ours=name == "a") for name in "ab"]
    results = asyncio.run(engine_bench.measure(engine_bench.parse(), systems, 100, tmp_path))
    assert results.is_cut_short
    assert {name: len(trials) for name, trials in results.trials["tiny"].items()} == {"a": kept, "b": kept}
    assert sorted(ended) == ["a", "b"]


def test_systems_share_the_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--kv-gib", "20", "--unshared", "--transformers", "continuous"]
    monkeypatch.setattr(sys, "argv", ["bench.engine", *options])
    arguments, gib = engine_bench.parse(), 2**30
    assert engine_bench.kv_bytes_of(arguments, None, gib) == 20 * gib
    assert engine_bench.kv_bytes_of(arguments, 78 * gib, gib) == 20 * gib
    assert engine_bench.kv_bytes_of(arguments, 60 * gib, gib) == 16 * gib
    with pytest.raises(SystemExit, match="3 systems do not fit 12"):
        engine_bench.kv_bytes_of(arguments, 12 * gib, gib)


DECODES = [Decode(32, 1), Decode(32, 8), Decode(64, 1), Decode(64, 8)]


@pytest.mark.parametrize(
    ("wanted", "max_blocks", "num_blocks", "num_left_out"),
    [
        (0, None, 48, 0),
        (100, None, 100, 0),
        (100, 60, 60, 0),
        (0, 47, 32, 1),
        (40, 36, 36, 1),
        (0, 5, 4, 3),
        (9, 3, 3, 4),
    ],
)
def test_decodes_that_do_not_fit_the_memory_are_left_out(
    wanted: int, max_blocks: int | None, num_blocks: int, num_left_out: int
) -> None:
    room = room_for(DECODES, num_steps=16, wanted_blocks=wanted, max_blocks=max_blocks)
    assert room.num_blocks == num_blocks
    assert len(room.left_out) == num_left_out
    assert sorted([*room.fitting, *room.left_out]) == sorted(DECODES)
    for decode in DECODES:
        needed = blocks_of_decodes(
            running=decode.running, context=decode.context, num_steps=16, block_size=16
        )
        assert (decode in room.fitting) == (needed <= num_blocks)


PROFILE = ["bench.profile", "--model", "demo", "--backend", "torch", "--threads", "1", "--steps", "2"]
PROFILE += ["--contexts", "64,128", "--decodes", "1,16", "--kv-gib", "0", "--skip-proof"]
WEIGHTS_AND_150_BLOCKS = 14_863_744 + 150 * 49_152


@pytest.mark.ci
def test_a_profile_ended_by_a_signal_reports_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is ended in a step of the engine, after the first decodes. The largest decodes have no room."""
    profile_steps, calls = profile_bench.profile_steps, count(1)

    def ended(engine: Any, *arguments: Any) -> Any:
        if next(calls) > 3:
            monkeypatch.setattr(engine.runner, "start", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        return profile_steps(engine, *arguments)

    monkeypatch.setattr(profile_bench, "profile_steps", ended)
    monkeypatch.setattr(profile_bench, "measure_machine", lambda *_: RATES)
    monkeypatch.setattr(profile_bench, "MANY", 16)
    memory = str(WEIGHTS_AND_150_BLOCKS / 2**30)
    monkeypatch.setattr(sys, "argv", [*PROFILE, "--memory-gib", memory, "--output", str(tmp_path)])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="cut short"):
            profile_bench.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    told = capsys.readouterr().out
    assert "left out for lack of memory: 16 sequences of 128 tokens, which need a pool of 0.0 GiB" in told
    assert "\n\n**UNPROVEN: measured without tests (--skip-proof).**\n" in told
    (report,) = tmp_path.glob("*-profile-cut-short-unproven.json")
    figures = json.loads(report.read_text(encoding="utf-8"))["figures"]
    assert (figures["cut_short"], figures["left_out"]) == (True, ["16 sequences of 128 tokens"])
    assert [(row["context"], row["sequences"]) for row in figures["of_roofline"]] == [(64, 1)]
    assert list(figures["steps"]) == ["decode, 1 sequences of 64 tokens"]
    assert "names" not in figures
