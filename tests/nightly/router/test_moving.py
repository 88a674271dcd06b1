"""Real workers drained one after another under load: running requests move in mid-stream, and no client sees it."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from blockyard.proto.v1 import cluster_pb2, inference_pb2
from blockyard.router.client.aio import AsyncClient
from blockyard.worker.config import EngineConfig, WorkerConfig
from blockyard.worker.server import WorkerServer

from tests.unit.router.fake_worker import SECRET
from tests.unit.router.rig import MODEL, READY, Router, running_router, until

NUM_STREAMS = 8
MAX_TOKENS = 60


def worker(number: int) -> WorkerServer:
    engine = EngineConfig(
        model=str(MODEL), engine="simulated", kv_cache_memory=64 * 2**20, simulated_step_seconds=0.02
    )
    return WorkerServer(
        WorkerConfig(engine=engine, worker_id=f"worker-{number}", cluster_secret=SECRET, redis_url=None)
    )


async def generate(router: Router, seed: int) -> Any:
    sampling = inference_pb2.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, seed=seed, n=2)
    return await router.inference.Generate(
        inference_pb2.GenerateRequest(prompt=f"def f_{seed}(x):", sampling=sampling), timeout=120
    )


def tokens(answer: Any) -> list[list[int]]:
    return [list(output.token_ids) for output in answer.outputs]


@pytest.mark.fault(30)
async def test_drains_in_turn_move_what_runs_fail_nobody_and_change_no_token(
    measured: dict[str, Any],
) -> None:
    async with AsyncExitStack() as stack:
        workers = [worker(number) for number in range(2)]
        addresses = []
        for one in workers:
            addresses.append(await one.start())
            stack.push_async_callback(one.stop, 0.0)
        router = await stack.enter_async_context(running_router(lost_seconds=20.0, suspect_seconds=10.0))
        client = await stack.enter_async_context(AsyncClient(router.address))
        router.server.set_workers(addresses)
        await until(lambda: are_ready(router, addresses), 60.0)
        undisturbed = [tokens(await generate(router, seed)) for seed in range(NUM_STREAMS)]
        is_over = asyncio.Event()
        answers: list[tuple[int, Any]] = []

        async def stream(seed: int) -> None:
            while not is_over.is_set():
                answers.append((seed, await generate(router, seed)))

        async with asyncio.TaskGroup() as tasks:
            for seed in range(NUM_STREAMS):
                tasks.create_task(stream(seed))
            moved = 0
            for name, address in zip(("worker-0", "worker-1") * 2, addresses * 2, strict=True):
                await until(lambda: is_in_the_middle(router, name), 60.0)  # noqa: B023
                moved += await client.drain_worker(name, grace_seconds=0.05)
                states = await router.states()
                assert states[address] == cluster_pb2.WORKER_STATE_DRAINING
                assert (await client.block_pool(name)).used_blocks == 0
                await client.resume_worker(name)
                await until(lambda: are_ready(router, addresses), 60.0)
            is_over.set()
        measured.update(failed=0, note=f"{moved} requests moved in 4 drains, {len(answers)} answers")
        assert moved > 0
        assert all(tokens(answer) == undisturbed[seed] for seed, answer in answers)
        assert {answer.finish.migrations for _, answer in answers} == {0}, "a drain counts as no death"


async def is_in_the_middle(router: Router, worker_id: str) -> bool:
    """Whether something runs there that has come to its tokens and has many to go."""
    return any(
        known.worker_id == worker_id and 0 < known.generated_tokens < MAX_TOKENS
        for known in await router.requests()
    )


async def are_ready(router: Router, addresses: list[str]) -> bool:
    states = await router.states()
    return [states.get(address) for address in addresses] == [READY] * len(addresses)
