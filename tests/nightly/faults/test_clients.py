"""Clients that leave: at any moment of a request, politely or not, and what the cluster frees then."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from blockyard.proto.v1 import inference_pb2
from blockyard.router.client import AsyncClient

from tests.system.load import CANARY, Load, answers, load, streams, until, until_ready
from tests.system.processes import SIMULATED, Processes, processes

from .chaos_proxy import ChaosProxy
from .invariants import (
    Baseline,
    all_is_as_before,
    blocks_are_free,
    each_ended_once,
    holders_of_blocks,
    pool_of,
    same_tokens,
)
from .rig import error_info, raw_inference, whole

FREE_SECONDS = 3.0
"""Bound, with the delays of a busy machine. Blocks are free within a step, 0.5 s at most."""
PREFILL_RATE = 300
LONG_PROMPT_TOKENS = 1900
"""More than six seconds of prefill."""
NUM_PLACES = 4
MAX_REQUESTS = 24
"""Requests that one client may hold. The router keeps one in sixteen of its permits for other clients."""
KEEPALIVE_SECONDS = 15.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Start one worker with few seq slots, so that requests wait."""
    options = (
        *SIMULATED,
        *("--simulated-step-seconds", "0.02", "--simulated-prefill-tokens-per-second", str(PREFILL_RATE)),
        *("--max-num-seqs", str(NUM_PLACES), "--max-num-batched-tokens", "128"),
    )
    with processes(tmp_path_factory.mktemp("clients")) as cluster:
        worker = cluster.add_worker("w0", *options)
        limit = ("--max-requests", str(MAX_REQUESTS + MAX_REQUESTS // 15))
        cluster.start(worker, cluster.add_router("r0", *limit, workers=[worker.address]))
        yield cluster


@asynccontextmanager
async def undisturbed(cluster: Processes) -> AsyncIterator[tuple[AsyncClient, Load]]:
    """Run two streams beside the fault, which must not affect them."""
    async with whole(cluster) as client:
        reference = await answers(client, streams(2, prefix="other", max_tokens=40))
        baseline = Baseline.of(cluster)
        async with load(client, streams(2, prefix="other", max_tokens=40)) as others:
            await others.until_tokens(2)
            yield client, others
            finished = await others.finished()
        same_tokens(finished, reference)
        each_ended_once(finished)
        await all_is_as_before(cluster, baseline, client)


async def _ends(cluster: Processes, client: AsyncClient) -> float:
    """Return the seconds until router and worker hold no request but the two others'."""
    started = time.monotonic()

    async def is_gone() -> bool:
        left = {request.request_id for request in await client.list_requests()}
        held = await holders_of_blocks(cluster.workers["w0"])
        return all(name.startswith("other") for name in left | held)

    await until(is_gone, "the request is gone")
    return time.monotonic() - started


@pytest.mark.fault(1)
async def test_a_cancelled_stream_gives_back_its_blocks(cluster: Processes, measured: dict[str, Any]) -> None:
    async with undisturbed(cluster) as (client, _), raw_inference(cluster.routers["r0"]) as stub:
        call = stub.GenerateStream(_request(max_tokens=1000), timeout=60.0)
        for _ in range(5):
            await call.read()
        call.cancel()
        freed = await _ends(cluster, client)
        assert await call.code() is grpc.StatusCode.CANCELLED
        generated = (await pool_of(cluster.workers["w0"])).load.generated_tokens
        assert generated < 1000
    measured.update(failed=0, migrated=0, recovery_seconds=freed)
    assert freed < FREE_SECONDS


@pytest.mark.fault(2)
async def test_a_request_cancelled_in_the_queue_is_never_scheduled(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    async with whole(cluster) as client:
        baseline = Baseline.of(cluster)
        async with load(client, streams(NUM_PLACES, max_tokens=400)) as running:
            await running.until_tokens(1)
            before = (await pool_of(cluster.workers["w0"])).load.prompt_tokens
            async with load(
                client, streams(MAX_REQUESTS - NUM_PLACES, prefix="queued", max_tokens=200)
            ) as waiting:
                await until(lambda: _num_held(client, MAX_REQUESTS), "all are in the router")
            left = await _ends_queued(client)
            await running.finished()
        after = (await pool_of(cluster.workers["w0"])).load
        measured.update(failed=0, migrated=0, recovery_seconds=left)
        assert all(stream.num_tokens == 0 for stream in waiting.streams)
        assert after.prompt_tokens == before
        # Their permits and charges are free for as many requests again.
        again = await answers(client, streams(MAX_REQUESTS, max_tokens=2))
        assert [stream.error for stream in again if stream.error is not None] == []
        await all_is_as_before(cluster, baseline, client)


async def _num_held(client: AsyncClient, wanted: int) -> bool:
    return len(await client.list_requests()) >= wanted


async def _ends_queued(client: AsyncClient) -> float:
    async def is_gone() -> bool:
        return not any(request.request_id.startswith("queued") for request in await client.list_requests())

    return await until(is_gone, "the queue is empty")


@pytest.mark.fault(3)
async def test_a_prompt_cancelled_between_chunks_gives_back_its_blocks(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    async with undisturbed(cluster) as (client, _), raw_inference(cluster.routers["r0"]) as stub:
        pool = await pool_of(cluster.workers["w0"])
        before, answered = pool.used_blocks, pool.load.prompt_tokens
        prompt = list(range(100, 100 + LONG_PROMPT_TOKENS))
        call = stub.GenerateStream(_request(prompt=prompt), timeout=60.0)

        async def is_within() -> bool:
            pool = await pool_of(cluster.workers["w0"])
            return pool.load.queued_prefill_tokens > 0 and pool.used_blocks > before + 8

        await until(is_within, "it is being computed")
        call.cancel()
        freed = await _ends(cluster, client)
        # A prompt is counted at its first token, which must not have come here.
        assert (await pool_of(cluster.workers["w0"])).load.prompt_tokens == answered
    measured.update(failed=0, migrated=0, recovery_seconds=freed)
    assert freed < FREE_SECONDS


@pytest.mark.fault(4)
async def test_cancelling_at_the_very_end_ends_each_request_once(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    """Cancel each request a little later than the one before, across the moment of the last token."""
    outcomes: list[str] = []
    async with undisturbed(cluster) as (client, _):
        for number in range(100):
            if number >= 20 and outcomes[-1] == "finished":
                break
            (stream,) = streams(1, prefix=f"end{number}", max_tokens=4)
            async with load(client) as running:
                running.start(stream)
                await stream.until_tokens(1)
                await asyncio.sleep(0.004 * number)
                running.cancel(stream)
            outcomes.append("finished" if stream.finish else "cancelled")
        await _ends(cluster, client)
    assert set(outcomes) == {"finished", "cancelled"}, "the moment of the last token was missed"
    measured.update(note=f"{outcomes.count('finished')} finished, {outcomes.count('cancelled')} cancelled")


CLIENT = """
import asyncio, sys
from blockyard.router.client import AsyncClient
async def main():
    async with AsyncClient(sys.argv[1]) as client:
        async for delta in client.stream("def g(x):", max_tokens=1500, ignore_eos=True):
            print(delta.token_offset, flush=True)
asyncio.run(main())
"""


@pytest.mark.fault(5)
async def test_a_killed_client_gives_back_its_blocks(cluster: Processes, measured: dict[str, Any]) -> None:
    async with undisturbed(cluster) as (client, _):
        command = [sys.executable, "-c", CLIENT, cluster.routers["r0"].address]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        for _ in range(5):
            assert await process.stdout.readline()
        process.kill()
        await process.wait()
        freed = await _ends(cluster, client)
    measured.update(failed=0, migrated=0, recovery_seconds=freed)
    assert freed < FREE_SECONDS


@pytest.mark.fault(6)
async def test_a_client_that_vanishes_is_noticed_by_keepalive(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    """A black hole hides the client: no FIN, no reset, no answer to pings. Undetected, the stream would run for more
    than three minutes."""
    slow = cluster.add_worker("crawls", *SIMULATED, "--simulated-step-seconds", "0.1")
    router = cluster.add_router("r6", workers=[slow.address])
    with cluster.extra(slow, router):
        async with AsyncClient(router.address, retries=0) as client, ChaosProxy(router.address) as proxy:
            await until_ready(client, slow.name)
            async with (
                AsyncClient(proxy.address, retries=0) as far,
                load(far, streams(1, max_tokens=1900)) as running,
            ):
                await running.until_tokens(5)
                await proxy.black_hole()
                freed = await _gone(client)
            measured.update(failed=0, migrated=0, recovery_seconds=freed)
            generated = (await pool_of(slow)).load.generated_tokens
            assert generated < 1000, "it ran to its end"
            await blocks_are_free(slow)


async def _gone(client: AsyncClient) -> float:
    async def is_gone() -> bool:
        return not await client.list_requests()

    return await until(is_gone, "the request is gone", seconds=4 * KEEPALIVE_SECONDS, every=0.1)


@pytest.mark.fault(7)
async def test_a_deadline_in_decode_ends_the_call_and_the_work(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    async with undisturbed(cluster) as (client, _):
        (stream,) = streams(1, prefix="late", max_tokens=1500)
        stream.timeout_seconds = 4.0
        await answers(client, [stream])
        freed = await _ends(cluster, client)
    measured.update(failed=0, migrated=0, recovery_seconds=freed)
    assert stream.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert stream.num_tokens > 0
    each_ended_once([stream])
    assert freed < FREE_SECONDS


@pytest.mark.fault(8)
async def test_a_hopeless_deadline_costs_no_prefill(cluster: Processes, measured: dict[str, Any]) -> None:
    """Its prompt takes six seconds to compute; its deadline is one second.

    No request of the last seconds had this prompt: one that was cancelled would count as an arrival.
    """
    async with whole(cluster) as client, raw_inference(cluster.routers["r0"]) as stub:
        # The rate is measured first: a worker that has computed nothing yet refuses nothing.
        await stub.Generate(_request(prompt=list(range(2000, 2800)), max_tokens=1), timeout=60.0)
        await blocks_are_free(cluster.workers["w0"])
        before = (await pool_of(cluster.workers["w0"])).cached_blocks
        started = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.Generate(_request(prompt=list(range(1999, 99, -1)), max_tokens=1), timeout=1.0)
        took = time.monotonic() - started
        await blocks_are_free(cluster.workers["w0"])
        # A computed chunk would have left its blocks in the cache.
        after = (await pool_of(cluster.workers["w0"])).cached_blocks
        measured.update(recovery_seconds=took, note="told so after that; its deadline was 1 s")
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert after == before
        assert error_info(failure.value).reason == "DEADLINE_UNREACHABLE"
        assert not await client.list_requests()


def _request(*, prompt: list[int] | None = None, max_tokens: int = 20) -> inference_pb2.GenerateRequest:
    sampling = {"max_tokens": max_tokens, "ignore_eos": True, "seed": 7}
    if prompt is not None:
        return inference_pb2.GenerateRequest(prompt_token_ids={"ids": prompt}, sampling=sampling)
    return inference_pb2.GenerateRequest(prompt=f"def late(x): # {CANARY}", sampling=sampling)
