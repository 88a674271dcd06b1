"""A worker seen from outside: in the index, in its map file, in Prometheus, and as a command."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from blockyard.deploy.machine.redis_server import RedisProcess, start_private_redis
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.v1 import cluster_pb2
from blockyard.worker.__main__ import parse
from blockyard.worker.config import EngineConfig, WorkerConfig
from blockyard.worker.execution.runner import TorchRunner
from blockyard.worker.inspection.pool_map import map_text
from blockyard.worker.server import WorkerServer
from blockyard.worker.startup.host_size import available_bytes, size_host_memory
from blockyard.worker.startup.loading import load_engine
from blockyard.worker.startup.openmp import PYTORCH_SPIN_COUNT, SPIN_COUNT

from .checkpoints import shared_checkpoint
from .test_session import ROOT, SECRET, Session, chain

KV_BYTES = 64 * 2 * 3 * 2 * 16 * 16 * 4


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisProcess]:
    server = start_private_redis(tmp_path)
    yield server
    server.stop()


def engine_settings(**changes: object) -> EngineConfig:
    settings = {
        "model": str(shared_checkpoint("LlamaForCausalLM")),
        "engine": "simulated",
        "kv_cache_memory": KV_BYTES,
    }
    return EngineConfig(**(settings | changes))  # type: ignore[arg-type]


async def test_what_a_worker_caches_is_found_in_the_index_and_goes_with_it(
    redis_server: RedisProcess,
) -> None:
    config = WorkerConfig(engine=engine_settings(), cluster_secret="hush", redis_url=redis_server.url)
    worker = WorkerServer(config)
    address = await worker.start()
    client = connect(redis_server.url, timeout_seconds=5)
    index = RedisPrefixIndex(client, "default")
    names = chain(ROOT, [5] * 40, 16)
    try:
        async with Session(address) as session:
            await session.submit(1, length=40)
            await session.tokens_of(1)
        for _ in range(100):
            if found := await index.lookup(names):
                break
            await asyncio.sleep(0.05)
        assert [(holder.worker_id, holder.incarnation, holder.depth) for holder in found] == [
            ("worker-0", worker.incarnation, 2)
        ]
        assert [record.address for record in await index.directory()] == [address]
    finally:
        await worker.stop(0)
    assert await index.lookup(names) == []
    await client.aclose()


async def test_the_thread_that_loads_ends_so_that_its_openmp_team_does_not_count() -> None:
    before = set(threading.enumerate())
    worker = WorkerServer(WorkerConfig(engine=engine_settings(), cluster_secret="hush"))
    await worker.start()
    try:
        await asyncio.sleep(0.05)
        new = {thread.name for thread in set(threading.enumerate()) - before}
        assert "engine" in new
        assert not any(name.startswith(("loading", "asyncio")) for name in new), new
    finally:
        await worker.stop()


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
    environment: dict[str, str], spin_count: str | None
) -> None:
    """Longer where there is no compiler for the C++ kernels: one that is named is looked for, not run."""
    others = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    program = (
        "import os, sys, blockyard.worker.__main__, blockyard.worker.llm; from blockyard.worker.startup import openmp; "
        "openmp.bound_spinning(); print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"
    )
    command = [sys.executable, "-c", program]
    printed = subprocess.run(
        command, env=others | environment, capture_output=True, text=True, check=True
    ).stdout
    assert printed == f"False {spin_count}\n"


async def test_the_map_file_agrees_with_the_pool(tmp_path: Path) -> None:
    path = tmp_path / "pool.log"
    worker = WorkerServer(
        WorkerConfig(engine=engine_settings(), cluster_secret="hush", pool_map_path=str(path))
    )
    await worker.start()
    try:
        async with Session(worker.address) as session:
            await session.submit(1, length=40)
            await session.tokens_of(1)
        await asyncio.sleep(1.5)
        stats = worker.stats()
        counts = re.search(r"= (\d+) free \+ (\d+) cached \+ (\d+) used", path.read_text())
        assert counts is not None
        names = ("blocks_free", "blocks_cached", "blocks_used")
        assert [int(count) for count in counts.groups()] == [stats[name] for name in names] == [62, 2, 0]
        assert path.read_text().count("c") > 2
    finally:
        await worker.stop(0)


def test_a_pool_below_one_full_sequence_is_refused_before_loading() -> None:
    with pytest.raises(ValueError, match="fewer than max_model_len"):
        load_engine(engine_settings(kv_cache_memory=KV_BYTES // 4))


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="beyond the model's"):
        load_engine(engine_settings(max_model_len=100_000))


def test_more_host_memory_than_the_machine_has_is_refused_before_loading() -> None:
    with pytest.raises(
        ValueError, match=r"host blocks would take .* lower --swap-space-gib or --host-cache-gib"
    ):
        load_engine(engine_settings(engine="model", host_cache_gib=1e6))


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
    worker = WorkerServer(WorkerConfig(engine=engine, cluster_secret="hush"))
    await worker.start()
    try:
        async with Session(worker.address) as session:
            for handle in range(1, 5):
                await session.submit(handle, length=40, max_tokens=60)
            tokens = await session.tokens_of(1, 2, 3, 4)
        assert [len(found) for found in tokens.values()] == [60] * 4
        assert worker.stats()["preemptions"] > 0
    finally:
        await worker.stop(0)


async def test_a_worker_tells_what_its_host_memory_keeps() -> None:
    engine = engine_settings(host_cache_gib=0.001, max_model_len=256, kv_cache_memory=KV_BYTES // 4)
    worker = WorkerServer(WorkerConfig(engine=engine, cluster_secret="hush"))
    await worker.start()
    try:
        async with Session(worker.address) as session:
            for handle, length in ((1, 200), (2, 201), (3, 17)):
                await session.submit(handle, length=length, token=handle)
                await session.tokens_of(handle)
            pool = await session.stub.GetBlockPool(cluster_pb2.GetBlockPoolRequest())
        assert pool.host_cache_blocks == 87
        assert pool.load.host_cached_blocks == worker.stats()["host_cached_blocks"] > 0
        assert f"host memory: {pool.load.host_cached_blocks} of 87 blocks" in map_text(pool)
    finally:
        await worker.stop(0)


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
    ],
)
def test_settings_out_of_bounds_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        engine_settings(**settings)


def test_every_setting_is_an_option_of_the_command() -> None:
    options = [
        "--swap-space-gib",
        "1.5",
        "--host-cache-gib",
        "2",
        "--preempt",
        "swap",
        "--max-preemptions",
        "2",
    ]
    more = ["--priority-ageing-seconds", "3", "--mixed-step-seconds", "0"]
    engine = parse(["--model", "somewhere", *options, *more]).engine
    assert (engine.swap_space_gib, engine.host_cache_gib, engine.preempt) == (1.5, 2.0, "swap")
    assert (engine.max_preemptions, engine.priority_ageing_seconds, engine.mixed_step_seconds) == (
        2,
        3.0,
        0.0,
    )
    assert parse(["--model", "somewhere"]).engine == EngineConfig(model="somewhere")


def test_the_size_is_logged_at_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="blockyard"):
        load_engine(engine_settings(swap_space_gib=0.01))
    assert (
        "host memory: swap space of 873 blocks, 0.01 GiB; prefix cache of 0 blocks, 0.00 GiB" in caplog.text
    )
    assert "KV cache: 1,024 tokens in 64 blocks of 16, 12,288 bytes a block" in caplog.text
    assert "maximum concurrency for requests of 512 tokens: 2.00" in caplog.text


@pytest.mark.ci
def test_the_command_serves_metrics_and_ends_well_on_sigterm() -> None:
    command = [
        sys.executable,
        "-m",
        "blockyard.worker",
        "--model",
        str(shared_checkpoint("LlamaForCausalLM")),
    ]
    options = ["--engine", "simulated", "--kv-cache-memory", str(KV_BYTES)]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=environment())
    try:
        assert process.stderr is not None
        url = next(match[1] for line in process.stderr if (match := re.search(r"metrics at (http\S+)", line)))
        text = urllib.request.urlopen(url, timeout=10).read().decode()
        assert re.search(r'blockyard_blocks_free\{cluster="default",.*worker="worker-0"\} 64\.0', text)
        assert re.search(r'blockyard_generated_tokens_total\{.*worker="worker-0"\} 0\.0', text)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.mark.ci
async def test_a_worker_whose_engine_hangs_ends_itself() -> None:
    command = [
        *(sys.executable, "-m", "blockyard.worker", "--model", str(shared_checkpoint("LlamaForCausalLM"))),
        *("--engine", "simulated", "--kv-cache-memory", str(KV_BYTES), "--metrics-port", "-1"),
        *("--simulated-fault", "7:hang", "--stall-seconds", "1"),
    ]
    variables = environment() | {"BLOCKYARD_CLUSTER_SECRET": SECRET}
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=variables)
    assert process.stderr is not None
    try:
        async for line in process.stderr:
            if match := re.search(rb"serves at (\S+)", line):
                break
        assert match is not None
        async with Session(match[1].decode()) as session:
            await session.submit(1, token=7)
            async with asyncio.timeout(30):
                said = await process.stderr.read()
                assert await process.wait() == 1
        assert b"has finished no step" in said
    finally:
        if process.returncode is None:
            process.kill()


@pytest.mark.ci
def test_the_command_says_what_is_wrong_and_fails(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    command = [sys.executable, "-m", "blockyard.worker", "--model", str(tmp_path)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment(), check=False
    )
    assert result.returncode == 1
    assert "BertModel" in result.stderr
    assert "Traceback" not in result.stderr


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


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
