"""The engine bench's systems as real processes: they generate the requested tokens.

A system that is absent, fails or takes too much memory is ended with all that it started, before the next one is
measured.
"""

import os
import sys
from argparse import Namespace
from math import inf
from pathlib import Path

import pytest

from bench.engine import systems
from bench.engine.__main__ import lost_of, measure
from bench.engine.figures import MIN_REPEATS, Results, figures_of
from bench.engine.peers.protocol import Request
from bench.engine.report import text_of
from bench.engine.shapes import model_folder
from bench.engine.systems import (
    SERVED,
    SERVED_PLAINTEXT,
    Running,
    System,
    SystemEnded,
    Trial,
    our_systems,
    peers,
    running,
)
from bench.engine.workloads import requests_of
from bench.router.processes import tree

GIB = 2**30
SETTINGS = {
    "model": str(model_folder("demo", "float32", Path(), with_weights=True)),
    "dtype": "float32",
    "device": "cpu",
    "kv_bytes": 2**25,
    "max_model_len": 512,
    "max_num_seqs": 256,
    "threads": 1,
}
ON_A_GPU = {
    "report": "engine",
    "model": "m",
    "device": "cuda",
    "device_name": "a GPU",
    "threads": 2,
    "repeats": MIN_REPEATS,
    "proven": "9 tests passed",
}


def workload(name: str) -> list[Request]:
    return requests_of(name, vocab_size=4096, rate=2.0, repeat=0)


async def run(system: System, folder: Path, requests: list[Request]) -> Trial:
    async with running(system, folder, 6 * GIB) as started:
        assert isinstance(started, Running), started
        return await started.run(requests)


async def test_our_engine_and_transformers_make_the_same_tokens_of_a_run(tmp_path: Path) -> None:
    ours = our_systems(SETTINGS, backends=["torch"], is_served=False, is_unshared=False)
    transformers = peers(
        SETTINGS, {"transformers": Path(sys.executable)}, None, batchings=["static", "continuous"]
    )
    requests = workload("tiny")
    heads = []
    for system in (*ours, *transformers):
        measured = await run(system, tmp_path, requests)
        assert [course.num_tokens for course in measured.courses] == [8] * 6
        assert all(0 < (course.first or 0) <= course.last for course in measured.courses)
        heads.append([course.head for course in measured.courses])
    assert heads[0] == heads[1] == heads[2]


@pytest.mark.parametrize("name", [SERVED, SERVED_PLAINTEXT])
async def test_the_clusters_own_path_is_a_worker_and_a_router_that_end_with_the_run(
    name: str, tmp_path: Path
) -> None:
    systems = our_systems(SETTINGS, backends=["torch"], is_served=True, is_unshared=False)
    (served,) = [system for system in systems if system.name == name]
    measured = await run(served, tmp_path, workload("tiny"))
    assert [course.num_tokens for course in measured.courses] == [8] * 6


def script(tmp_path: Path, text: str) -> System:
    path = tmp_path / "peer.py"
    path.write_text(text)
    return System(name="a peer", command=(sys.executable, str(path)), settings={})


STARTS_A_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
pids = f"{os.getpid()} {child.pid}"
"""


def living(pids: str) -> list[int]:
    """Return the processes that still run. A zombie does not count: its parent has not waited for it yet."""
    stats = {int(pid): Path(f"/proc/{pid}/stat") for pid in pids.split()}
    return [pid for pid, stat in stats.items() if stat.exists() and ") Z " not in stat.read_text()]


async def test_an_absent_peer_says_why_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is not installed, takes too much memory, ends, or does not stand ready in time."""
    (vllm,) = peers(SETTINGS, {"vllm": Path(sys.executable)}, None, batchings=[])
    before = tree(os.getpid())
    for text, memory, why in (
        ("", GIB, "vllm cannot be imported"),
        ("held = bytearray(300 << 20); time.sleep(60)", 290 << 20, "killed by the benchmark at 0.3 GiB"),
        ("sys.exit(1)", GIB, "it has ended"),
        ("time.sleep(60)", GIB, "it was not ready within 0 s"),
    ):
        if "not ready" in why:
            monkeypatch.setattr(systems, "LOAD_SECONDS", 0.2)
        pids = f"open({str(tmp_path / 'pids')!r}, 'w').write(pids)"
        peer = script(tmp_path, f"{STARTS_A_CHILD}\n{pids}; {text}") if text else vllm
        async with running(peer, tmp_path, memory) as started:
            assert isinstance(started, str)
            assert why in started
            assert tree(os.getpid()) == before, "it runs beside what is measured"
            if (tmp_path / "pids").exists():
                assert living((tmp_path / "pids").read_text()) == []


async def test_a_peer_that_brings_too_few_tokens_can_be_ended_with_all_that_it_started(
    tmp_path: Path,
) -> None:
    short = PEER.replace("FAILS_AT", "99").replace("SECONDS", "0").replace("num_tokens=asked", "num_tokens=1")
    short = short.replace('notes=""', "notes=pids") + "    time.sleep(60)\n"
    async with running(script(tmp_path, STARTS_A_CHILD + short), tmp_path, GIB) as started:
        assert isinstance(started, Running), started
        with pytest.raises(ValueError, match="1 of 8 tokens"):
            await started.run(workload("tiny"))
        assert len(living(started.notes)) == 2
        await started.kill()
        assert living(started.notes) == []
        assert int(started.notes.split()[0]) not in tree(os.getpid()), "it is waited for"


async def test_a_peer_that_ends_amid_a_run_is_told_apart_from_a_slow_one(tmp_path: Path) -> None:
    hello = '{"versions": {}, "notes": "", "load_seconds": 0.1}'
    dying = script(tmp_path, f"input(); print('{hello}', flush=True); input(); raise SystemExit('enough')\n")
    async with running(dying, tmp_path, GIB) as started:
        assert isinstance(started, Running)
        with pytest.raises(SystemEnded, match="enough"):
            await started.run(workload("tiny"))


PEER = """
import json, sys, time
def say(**message): print(json.dumps(message), flush=True)
sys.stdin.readline()
say(versions={}, notes="", load_seconds=0.1)
for number, line in enumerate(sys.stdin):
    if number >= FAILS_AT: raise SystemExit("out of memory")
    time.sleep(SECONDS)
    done = dict(submitted=0.0, first=0.1, last=0.2, head=[1])
    say(courses=[done | dict(num_tokens=asked) for _, _, asked in json.loads(line)])
"""


def scripted(tmp_path: Path, name: str, *, fails_at: int = 99, seconds: float = 0.0, is_ours: bool) -> System:
    """Return a system that answers each request list after `seconds`, and fails at list `fails_at`; 0 is warm-up."""
    path = tmp_path / f"{name}.py"
    path.write_text(PEER.replace("FAILS_AT", str(fails_at)).replace("SECONDS", str(seconds)))
    return System(name=name, command=(sys.executable, str(path)), settings={}, is_ours=is_ours)


async def measured(
    systems: list[System], tmp_path: Path, *, repeats: int = MIN_REPEATS, seconds: float = inf
) -> Results:
    arguments = Namespace(
        memory_gib=1.0, workloads="tiny,brief", repeats=repeats, rate=1.0, workload_seconds=seconds
    )
    arguments.transformers, arguments.vllm_python, arguments.openvino_python = "", None, None
    return await measure(arguments, systems, 4096, tmp_path)


async def test_who_fails_ours_too_loses_its_own_figures_alone(tmp_path: Path) -> None:
    ours = scripted(tmp_path, "blockyard triton", fails_at=2, is_ours=True)
    unshared = scripted(tmp_path, "blockyard, nothing shared", is_ours=True)
    absent = script(tmp_path, "raise SystemExit('CUDA out of memory')")
    results = await measured([ours, unshared, absent], tmp_path)
    assert results.systems["blockyard triton"]["failed"] == "it has ended: out of memory"
    assert results.systems["a peer"] == {"absent": "it has ended: CUDA out of memory"}
    assert {name: [len(trials) for trials in rows.values()] for name, rows in results.trials.items()} == {
        "tiny": [3],
        "brief": [3],
    }
    text = text_of(figures_of({"bfloat16": results}, ON_A_GPU))
    assert "**failed**: it has ended: out of memory" in text
    assert "nano, bfloat16: blockyard triton / the roofline" in text, "the floor is not another row's"
    assert lost_of({"bfloat16": results}) == "blockyard triton in bfloat16"


async def test_no_repeat_beyond_those_that_claims_need_begins_when_a_workload_has_had_its_time(
    tmp_path: Path,
) -> None:
    slow = scripted(tmp_path, "slow", seconds=0.1, is_ours=True)
    results = await measured([slow], tmp_path, repeats=MIN_REPEATS + 2, seconds=0.05)
    assert [len(rows["slow"]) for rows in results.trials.values()] == [MIN_REPEATS] * 2
    assert lost_of({"bfloat16": results}) == ""
