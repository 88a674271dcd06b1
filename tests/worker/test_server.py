"""A worker as others meet it: in the index, in its map file, in Prometheus, and as a command."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockyard.deploy.redis_server import RedisProcess, start_private_redis
from blockyard.proto.redis_prefix_index import RedisPrefixIndex, connect
from blockyard.worker.config import EngineConfig, WorkerConfig
from blockyard.worker.loading import load_engine
from blockyard.worker.server import WorkerServer

from .checkpoints import shared_checkpoint
from .test_session import ROOT, Session, chain

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


def test_the_size_is_logged_at_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="blockyard"):
        load_engine(engine_settings())
    assert "KV cache: 1,024 tokens in 64 blocks of 16, 12,288 bytes a block" in caplog.text
    assert "maximum concurrency for requests of 512 tokens: 2.00" in caplog.text


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
        assert 'blockyard_blocks_free{worker="worker-0"} 64.0' in text
        assert 'blockyard_generated_tokens_total{worker="worker-0"} 0.0' in text
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


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
