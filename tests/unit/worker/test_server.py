"""A worker seen from outside: in its map file, in its log, and by the settings that it takes and refuses."""

import asyncio
import os
import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from blockyard.proto.v1 import cluster_pb2
from blockyard.worker.__main__ import parse
from blockyard.worker.config import EngineConfig, WorkerConfig
from blockyard.worker.execution.runner import TorchRunner
from blockyard.worker.inspection.pool_map import map_text
from blockyard.worker.server import WorkerServer
from blockyard.worker.startup.host_size import available_bytes, size_host_memory
from blockyard.worker.startup.loading import load_engine
from blockyard.worker.startup.openmp import PYTORCH_SPIN_COUNT, SPIN_COUNT, bound_spinning

from .serving import KV_BYTES, Session, engine_settings, serving


async def test_the_thread_that_loads_ends_so_that_its_openmp_team_does_not_count() -> None:
    before = set(threading.enumerate())
    async with serving():
        await asyncio.sleep(0.05)
        new = {thread.name for thread in set(threading.enumerate()) - before}
        assert "engine" in new
        assert not any(name.startswith(("loading", "asyncio")) for name in new), new


@pytest.mark.parametrize(
    ("environment", "spin_count"),
    [
        ({"CXX": sys.executable}, str(SPIN_COUNT)),
        ({"CXX": "/no/compiler"}, str(PYTORCH_SPIN_COUNT)),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "passive"}, None),
    ],
)
def test_openmp_threads_spin_briefly_unless_the_environment_says_otherwise(
    environment: dict[str, str], spin_count: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer where there is no compiler for the C++ kernels: one that is named is looked for, not run."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    bound_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == spin_count


async def test_the_map_file_agrees_with_the_pool(tmp_path: Path) -> None:
    path = tmp_path / "pool.log"
    async with serving(pool_map_path=str(path)) as worker, Session(worker.address) as session:
        await session.submit(1, length=40)
        await session.tokens_of(1)
        await asyncio.sleep(1.5)
        stats = worker.stats()
        counts = re.search(r"= (\d+) free \+ (\d+) cached \+ (\d+) used", path.read_text())
        assert counts is not None
        names = ("blocks_free", "blocks_cached", "blocks_used")
        assert [int(count) for count in counts.groups()] == [stats[name] for name in names] == [62, 2, 0]
        assert path.read_text().count("c") > 2


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kv_cache_memory": KV_BYTES // 4}, "fewer than max_model_len"),
        ({"max_model_len": 100_000}, "beyond the model's"),
        (
            {"engine": "model", "host_cache_gib": 1e6},
            r"host blocks would take .* lower --swap-space-gib or --host-cache-gib",
        ),
    ],
)
def test_what_cannot_fit_is_refused_before_loading(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        load_engine(engine_settings(**changes))


@pytest.mark.parametrize(
    ("changes", "swap_blocks", "cache_blocks"),
    [
        ({}, 0, 0),
        ({"swap_space_gib": 0.01}, 873, 0),
        ({"swap_space_gib": 0.01, "preempt": "recompute", "host_cache_gib": 0.01}, 0, 873),
        ({"preempt": "swap", "engine": "simulated"}, 349525, 0),
    ],
)
def test_host_memory_becomes_blocks(changes: dict[str, object], swap_blocks: int, cache_blocks: int) -> None:
    loaded = load_engine(engine_settings(**({"engine": "model", "device": "cpu"} | changes)))
    assert (loaded.host_size.swap_blocks, loaded.host_size.cache_blocks) == (swap_blocks, cache_blocks)
    assert loaded.engine.scheduler.config.swap_blocks == swap_blocks
    if isinstance(loaded.runner, TorchRunner) and loaded.host_size.num_blocks:
        assert loaded.runner.host_blocks is not None
        assert loaded.runner.host_blocks.num_slots == loaded.host_size.num_blocks
        assert loaded.engine.scheduler.mixed_steps.rates.swap_blocks_per_second > 0


def test_a_gpu_has_4_gib_of_swap_space_unless_the_machine_has_little_memory() -> None:
    block_bytes = 2**20
    available = available_bytes()
    assert available is not None
    size = size_host_memory(EngineConfig(model="somewhere"), torch.device("cuda"), block_bytes)
    expected = min(4096, available // 4 // block_bytes)
    # Others take and give memory meanwhile.
    assert size.swap_blocks == pytest.approx(expected, rel=0.2)
    assert size.cache_blocks == 0


async def test_a_simulated_worker_that_swaps_serves_more_than_fits() -> None:
    engine = engine_settings(preempt="swap", max_model_len=256, kv_cache_memory=KV_BYTES // 4)
    async with serving(engine) as worker, Session(worker.address) as session:
        for handle in range(1, 5):
            await session.submit(handle, length=40, max_tokens=60)
        tokens = await session.tokens_of(1, 2, 3, 4)
        assert [len(found) for found in tokens.values()] == [60] * 4
        assert worker.stats()["preemptions"] > 0


async def test_a_worker_tells_what_its_host_memory_keeps() -> None:
    engine = engine_settings(host_cache_gib=0.001, max_model_len=256, kv_cache_memory=KV_BYTES // 4)
    async with serving(engine) as worker, Session(worker.address) as session:
        for handle, length in ((1, 200), (2, 201), (3, 17)):
            await session.submit(handle, length=length, token=handle)
            await session.tokens_of(handle)
        pool = await session.stub.GetBlockPool(cluster_pb2.GetBlockPoolRequest())
        assert pool.host_cache_blocks == 87
        assert pool.load.host_cached_blocks == worker.stats()["host_cached_blocks"] > 0
        assert f"host memory: {pool.load.host_cached_blocks} of 87 blocks" in map_text(pool)


@pytest.mark.parametrize(
    "settings",
    [
        {"swap_space_gib": -1.0},
        {"host_cache_gib": float("nan")},
        {"preempt": "never"},
        {"preempt": "swap", "swap_space_gib": 0.0},
        {"priority_ageing_seconds": 0.0},
        {"mixed_step_seconds": -0.1},
        {"max_preemptions": -1},
        {"protected_cache_share": -0.1},
        {"protected_cache_share": 1.0},
        {"protected_cache_share": float("nan")},
    ],
)
def test_settings_out_of_bounds_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        engine_settings(**settings)


@pytest.mark.parametrize("grace_seconds", [-1.0, float("nan"), float("inf")])
def test_a_grace_that_makes_no_sense_is_refused(grace_seconds: float) -> None:
    with pytest.raises(ValueError, match="grace_seconds"):
        WorkerConfig(engine=engine_settings(), grace_seconds=grace_seconds)


def test_every_setting_is_an_option_of_the_command() -> None:
    settings = {
        "swap_space_gib": 1.5,
        "host_cache_gib": 2.0,
        "preempt": "swap",
        "max_preemptions": 2,
        "priority_ageing_seconds": 3.0,
        "mixed_step_seconds": 0.0,
    }
    options = [
        word for name, value in settings.items() for word in (f"--{name}".replace("_", "-"), str(value))
    ]
    assert parse(["--model", "somewhere", *options]).engine == EngineConfig(model="somewhere", **settings)  # type: ignore[arg-type]
    assert parse(["--model", "somewhere"]).engine == EngineConfig(model="somewhere")


def test_the_size_is_logged_at_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="blockyard"):
        load_engine(engine_settings(swap_space_gib=0.01))
    for told in (
        "host memory: swap space of 873 blocks, 0.01 GiB; prefix cache of 0 blocks, 0.00 GiB",
        "KV cache: 1,024 tokens in 64 blocks of 16, 12,288 bytes a block",
        "maximum concurrency for requests of 512 tokens: 2.00",
    ):
        assert told in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.2", "0.0.0.0", "worker.example"])
async def test_without_a_secret_a_worker_serves_loopback_alone_and_says_so(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Both before it loads anything; a name is not looked up."""
    engine = engine_settings(model="/nowhere")
    worker = WorkerServer(WorkerConfig(engine=engine, host=host, advertise_host="127.0.0.2"))
    is_open = host != "127.0.0.2"
    told = "without a cluster secret would serve every client that reaches" if is_open else "/nowhere"
    with pytest.raises(ValueError, match=told):
        await worker.start()
    assert ("no cluster secret" in caplog.text) is not is_open
