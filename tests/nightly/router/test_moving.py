"""Real workers drained one after another under load: running requests move in mid-stream, and no client sees it."""

import asyncio
from typing import Any

import pytest
from blockyard.proto.v1 import cluster_pb2, inference_pb2

from tests.unit.router.rig import READY, Router, until

from .rig import SIMULATED, Cluster, cluster

NUM_STREAMS = 8
MAX_TOKENS = 60


async def generate(router: Router, seed: int) -> Any:
    sampling = inference_pb2.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, seed=seed, n=2)
    wanted = inference_pb2.GenerateRequest(prompt=f"def f_{seed}(x):", sampling=sampling)
    return await router.inference.Generate(wanted, timeout=120)


def tokens(answer: Any) -> list[list[int]]:
    return [list(output.token_ids) for output in answer.outputs]


@pytest.mark.fault(30)
async def test_drains_in_turn_move_what_runs_fail_nobody_and_change_no_token(measured: dict[str, Any]):
    async with cluster(**SIMULATED) as here:
        router, client = here.router, here.client
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
            for name in ("worker-0", "worker-1") * 2:
                await until(lambda: is_in_the_middle(router, name), 60.0)  # noqa: B023
                moved += await client.drain_worker(name, grace_seconds=0.05)
                assert await states(here) == {name: cluster_pb2.WORKER_STATE_DRAINING, other(name): READY}
                assert (await client.block_pool(name)).used_blocks == 0
                await client.resume_worker(name)
                await until(lambda: are_ready(here), 60.0)
            is_over.set()
        measured.update(failed=0, note=f"{moved} requests moved in 4 drains, {len(answers)} answers")
        assert moved > 0
        assert all(tokens(answer) == undisturbed[seed] for seed, answer in answers)
        assert {answer.finish.migrations for _, answer in answers} == {0}, "a drain counts as no death"


def other(name: str) -> str:
    return "worker-1" if name == "worker-0" else "worker-0"


async def is_in_the_middle(router: Router, worker_id: str) -> bool:
    """Whether something runs there that has come to its tokens and has many to go."""
    return any(
        known.worker_id == worker_id and 0 < known.generated_tokens < MAX_TOKENS
        for known in await router.requests()
    )


async def states(here: Cluster) -> dict[str, int]:
    return {worker.worker_id: worker.state for worker in await here.client.list_workers()}


async def are_ready(here: Cluster) -> bool:
    return set((await states(here)).values()) == {READY}
