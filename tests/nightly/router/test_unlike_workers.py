"""Real workers with unlike blocks: they say why they exchange none, and a sequence that moves is computed again."""

import asyncio

import pytest
from blockyard.deploy.machine.redis_server import RedisProcess
from blockyard.router.client.errors import InvalidRequestError

from tests.unit.router.rig import until

from .rig import ask, cluster, known_links, outputs, prompt

__all__ = ["known_links"]


async def test_an_admin_is_told_why_unlike_workers_exchange_nothing(server: RedisProcess) -> None:
    """A worker in deterministic mode beside one that is not, as in a rolling restart that changes the setting."""
    async with cluster(redis_url=server.url, lend_share=0.5, first={"deterministic": False}) as here:
        asked = prompt(5, 200)
        await here.drain(1)
        await ask(here.client, 1, prompt_token_ids=asked)
        await here.client.resume_worker("worker-1")

        async def is_known() -> bool:
            return bool((await here.client.lookup_prefix(prompt_token_ids=asked)).holders)

        await until(is_known, 30.0)
        for source in ("worker-0", None):
            with pytest.raises(InvalidRequestError, match=r"of another kind: .*kernels is") as refused:
                await here.client.pull_prefix("worker-1", prompt_token_ids=asked, source_id=source)
            assert refused.value.reason == "PULL_IMPOSSIBLE"
        assert all(one.kv_layout for one in await here.client.list_workers())


@pytest.mark.parametrize("first", [0, 1])
async def test_a_sequence_that_moves_to_an_unlike_worker_goes_on_by_recomputation(first: int) -> None:
    """In both directions. The blocks of the first worker lie in another order."""
    settings = {"deterministic": bool(first)}
    async with cluster(lend_share=0.5, first=settings, deterministic=not first) as here:
        await here.drain(0)
        expected = await ask(here.client, 3, temperature=0.0)
        await here.client.resume_worker("worker-0")
        await here.client.flush_cache()
        await here.drain(1)
        running = asyncio.create_task(ask(here.client, 3, temperature=0.0))
        await here.until_generating(1, 20)
        await here.client.resume_worker("worker-1")
        assert await here.drain(0) == 1
        answer = await running
        assert answer.finish.worker_id == "worker-1"
        assert outputs(answer) == outputs(expected)
        assert here.starts[1].reports == [], "no router orders a pull that the source would refuse"
        assert here.starts[1].computed[-1][1] > 100
