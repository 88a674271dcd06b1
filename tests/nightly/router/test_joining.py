"""A worker that joins under load gets requests soon, and no rush because it is empty."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest
from blockyard.deploy.machine.redis_server import RedisProcess
from blockyard.proto.v1 import inference_pb2
from blockyard.worker.config import EngineConfig, WorkerConfig
from blockyard.worker.server import WorkerServer

from tests.unit.router.fake_worker import SECRET
from tests.unit.router.rig import MODEL, READY, Router, running_router, until

NUM_WORKERS = 3
NUM_GROUPS = 9
NUM_CLIENTS = 36
FIRST_SECONDS = 3.0
USED_SECONDS = 20.0
"""Ten times the bound that is told."""


def worker(number: int, redis_url: str) -> WorkerServer:
    engine = EngineConfig(
        model=str(MODEL),
        engine="simulated",
        kv_cache_memory=256 * 2**20,
        simulated_prefill_tokens_per_second=4_000.0,
        simulated_step_seconds=0.02,
    )
    config = WorkerConfig(
        engine=engine, worker_id=f"worker-{number}", cluster_secret=SECRET, redis_url=redis_url
    )
    return WorkerServer(config)


@dataclass
class Load:
    """Clients that ask again as soon as they are answered, each group of them with a long prefix of its own."""

    router: Router
    placed: list[tuple[float, str]] = field(default_factory=list)
    """Time of the first token of each answer, and its worker."""

    async def run(self, client: int) -> None:
        loop = asyncio.get_running_loop()
        group = client % NUM_GROUPS
        prefix = [100 + group] * 400
        turn = 0
        while True:
            turn += 1
            wanted = inference_pb2.GenerateRequest(
                prompt_token_ids=inference_pb2.TokenIds(ids=[*prefix, *[1 + client, turn % 50 + 1] * 8]),
                sampling={"max_tokens": 20, "ignore_eos": True, "seed": client},
            )
            began = loop.time()
            answer = await self.router.inference.Generate(wanted)
            finish = answer.outputs[0].finish
            first_seconds = finish.timing.time_to_first_token_seconds
            self.placed.append((began + first_seconds, finish.worker_id))

    def share_of(self, worker_id: str, since: float, until: float) -> float:
        counted = Counter(name for at, name in self.placed if since <= at < until)
        return counted[worker_id] / max(1, counted.total())


@pytest.fixture
async def loaded(server: RedisProcess) -> AsyncIterator[tuple[Load, str]]:
    async with AsyncExitStack() as stack:
        workers = [worker(number, server.url) for number in range(NUM_WORKERS)]
        for one in workers:
            await one.start()
            stack.push_async_callback(one.stop, 0.0)
        router = await stack.enter_async_context(running_router(redis_url=server.url))
        await until(lambda: all_ready(router, NUM_WORKERS), 30.0)
        load = Load(router)
        async with asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(load.run(client)) for client in range(NUM_CLIENTS)]
            await until(lambda: len(load.placed) >= 10 * NUM_CLIENTS, 120.0)
            yield load, server.url
            for client in clients:
                client.cancel()


async def all_ready(router: Router, count: int) -> bool:
    return list((await router.states()).values()).count(READY) == count


@pytest.mark.fault(32)
async def test_a_worker_that_joins_is_used_soon_and_not_overrun(loaded, measured):
    load, redis_url = loaded
    loop = asyncio.get_running_loop()
    newcomer = worker(NUM_WORKERS, redis_url)
    await newcomer.start()
    try:
        await until(lambda: all_ready(load.router, NUM_WORKERS + 1), 30.0)
        joined = loop.time()
        name = newcomer.config.worker_id
        await until(lambda: any(who == name for _, who in load.placed), USED_SECONDS)
        used_after = min(at for at, who in load.placed if who == name) - joined
        await asyncio.sleep(max(0.0, joined + FIRST_SECONDS - loop.time()))
        fair = 1 / (NUM_WORKERS + 1)
        overall = load.share_of(name, joined, joined + FIRST_SECONDS)
        measured["note"] = (
            f"used {used_after:.2f} s after it was ready; {overall:.0%} of the first {FIRST_SECONDS:g} s' requests, "
            f"fair is {fair:.0%}"
        )
        assert overall <= 2 * fair
    finally:
        await newcomer.stop(0.0)
