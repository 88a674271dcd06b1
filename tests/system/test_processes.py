"""The everyday path without Ray: both APIs, a found prefix, a killed worker, and a Redis that comes back empty."""

import asyncio

from blockyard.deploy.machine.redis_server import start_private_redis
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import AsyncClient
from openai import AsyncOpenAI

from tests.nightly.faults.invariants import Baseline, all_is_as_before, each_ended_once, same_tokens
from tests.nightly.faults.rig import busiest, victims

from .load import answers, holders, load, streams, until, until_ready
from .processes import SECRET, Processes

EXACT = cluster_pb2.INDEX_STATE_EXACT
PROMPT = "".join(f"value_{line} = {line}\n" for line in range(12))


async def test_both_apis_give_the_same_tokens_and_find_the_prefix(plain: Processes, http_port: int) -> None:
    async with (
        AsyncClient(plain.routers["r0"].address) as client,
        AsyncOpenAI(base_url=f"http://127.0.0.1:{http_port}/v1", api_key="none") as openai,
    ):
        await until_ready(client, "w0", "w1")
        first = await client.generate(PROMPT, max_tokens=8, seed=1, ignore_eos=True)

        async def is_found() -> bool:
            holders = (await client.lookup_prefix(PROMPT)).holders
            return [holder.worker_id for holder in holders] == [first.finish.worker_id]

        await until(is_found, "the index names the worker that has the prompt")
        again = await openai.completions.create(
            model="demo",
            prompt=PROMPT,
            max_tokens=8,
            seed=1,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        assert again.choices[0].model_dump()["token_ids"] == list(first.token_ids)
        assert again.usage is not None
        assert again.usage.prompt_tokens_details is not None
        cached_tokens = again.usage.prompt_tokens_details.cached_tokens or 0
        assert first.finish.cached_tokens == 0 < first.finish.prompt_tokens - 16 < cached_tokens


async def test_streams_of_a_killed_worker_go_on_elsewhere_with_each_token_once(plain: Processes) -> None:
    async with AsyncClient(plain.routers["r0"].address, retries=0) as client:
        await until_ready(client, "w0", "w1")
        reference = await answers(client, streams(8, max_tokens=100))
        baseline = Baseline.of(plain)
        async with load(client, streams(8, max_tokens=100)) as running:
            await running.until_tokens(5)
            held = await holders(client)
            killed = plain.workers[busiest(held)]
            killed.kill()
            finished = await running.finished()
        same_tokens(finished, reference)
        each_ended_once(finished)
        moved = victims(finished, held, killed.name)
        assert [stream.finish.migrations for stream in moved if stream.finish] == [1] * len(moved)
        await asyncio.to_thread(plain.start, killed)
        await until_ready(client, "w0", "w1")
        await all_is_as_before(plain, baseline, client)


async def test_a_redis_that_comes_back_empty_fails_no_request_and_is_told_everything_anew(
    plain: Processes,
) -> None:
    assert plain.redis is not None
    async with AsyncClient(plain.routers["r0"].address, retries=0) as client:
        await until_ready(client, "w0", "w1")

        async def is_exact() -> bool:
            return (await client.cluster_info()).index_state == EXACT

        async def is_found() -> bool:
            found = await client.lookup_prefix(PROMPT)
            return first.finish.worker_id in [holder.worker_id for holder in found.holders]

        async def is_degraded() -> bool:
            return not await is_exact()

        first = await client.generate(PROMPT, max_tokens=2)
        await until(is_exact, "the index is exact")
        plain.redis.stop()
        assert (await client.generate(PROMPT, max_tokens=2)).finish.completion_tokens > 0
        await until(is_degraded, "the loss is told")
        folder, port = plain.redis.log_path.parent, plain.redis.port
        plain.redis = await asyncio.to_thread(start_private_redis, folder, password=SECRET, port=port)
        await until(is_exact, "the index is exact again", seconds=60.0)
        await until(is_found, "the prefix is found again")
