"""Rows 63, 65, 68 and 69 with blocks of megabytes: what happens to them while a pull stands still."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import pytest
from blockyard.proto.naming.block_hash import chain
from blockyard.proto.v1.session_pb2 import PullEnd
from blockyard.worker.engine import Engine
from blockyard.worker.sequences.identifiers import BlockName
from blockyard.worker.server import WorkerServer
from blockyard.worker.transfer.lender import MAX_LOANS

from tests.nightly.faults.transfer_rig import BLOCK_BYTES, KV_SHAPE, PREFIX_BYTES, Tap, tapped
from tests.unit.worker.checkpoints import shared_checkpoint
from tests.unit.worker.test_session import ROOT
from tests.unit.worker.test_transfer import (
    BLOCKS,
    LENGTH,
    Router,
    a_worker,
    bytes_of_blocks,
    check_idle,
    pull_from,
    transfer_port,
)

T = TypeVar("T")


async def in_engine(worker: WorkerServer, command: Callable[[Engine], T]) -> T:
    return await asyncio.wrap_future(worker._engine.call(command))


def heavy(**changes: Any) -> dict[str, Any]:
    """Return settings of a worker whose blocks are megabytes."""
    settings = {
        "model": str(shared_checkpoint("LlamaForCausalLM", **KV_SHAPE)),
        "kv_cache_memory": 40 * BLOCK_BYTES,
        "host_cache_gib": 40 * BLOCK_BYTES / 2**30,
        "lend_share": 0.5,
        "secret": "",
    }
    return settings | changes


@asynccontextmanager
async def held(
    worker: WorkerServer, position: int
) -> AsyncIterator[tuple[Tap, asyncio.Event, asyncio.Event]]:
    """Yield a proxy that stops at this byte, an event that it has stopped there, and one that lets it go on."""
    reached, goes_on = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        reached.set()
        await goes_on.wait()

    async with tapped(await transfer_port(worker, ""), position, hold) as tap:
        yield tap, reached, goes_on
        goes_on.set()


@pytest.mark.fault(63)
@pytest.mark.parametrize("tier", ["pool", "host"])
async def test_lent_blocks_outlive_eviction_and_a_flush(tier: str, measured: dict[str, Any]) -> None:
    async with a_worker("w0", **heavy()) as source, a_worker("w1", **heavy()) as destination:
        async with Router(source, "") as there, Router(destination, "") as here:
            expected = await there.ask(1)
            if tier == "host":
                await _fill(there, first=10)
            wanted = await bytes_of_blocks(source)
            assert len(wanted) == BLOCKS
            async with held(source, PREFIX_BYTES // 4) as (tap, reached, goes_on):
                order = await pull_from(source, "", address=tap.address, seconds=60.0)
                await here.submit(1, length=LENGTH, sampling={"seed": 7}, pull=order)
                await asyncio.wait_for(reached.wait(), 20)
                await in_engine(source, lambda engine: engine.flush())
                await _fill(there, first=20)
                await _fill(there, first=30)
                assert (await in_engine(source, lambda engine: engine.load())).used_blocks == (
                    BLOCKS if tier == "pool" else 0
                )
                goes_on.set()
                assert await here.tokens_of(1) == {1: expected}
            assert here.reports[1].end == PullEnd.PULL_END_WHOLE
            assert (await bytes_of_blocks(destination))[:BLOCKS] == wanted
            measured.update(failed=0)
        await check_idle(source)
        await check_idle(destination)


async def _fill(router: Router, *, first: int) -> None:
    """Let other prompts take all blocks of the pool, and evict what is there to host memory."""
    for handle in range(first, first + 4):
        await router.ask(handle, token=handle)


@pytest.mark.fault(63)
async def test_a_source_that_has_evicted_sends_the_fewer_that_it_has() -> None:
    async with (
        a_worker("w0", **heavy(host_cache_gib=0.0)) as source,
        a_worker("w1", **heavy()) as destination,
        Router(source, "") as there,
        Router(destination, "") as here,
    ):
        expected = await there.ask(1)
        order = await pull_from(source, "")
        await _fill(there, first=10)
        assert await here.ask(1, pull=order) == expected
        assert here.reports[1].end == PullEnd.PULL_END_FEWER
        assert here.reports[1].num_blocks < BLOCKS


@pytest.mark.fault(63)
@pytest.mark.parametrize("is_flipped", [False, True])
async def test_a_bit_that_flips_in_the_sources_host_memory_reaches_nobody(is_flipped: bool) -> None:
    async with (
        a_worker("w0", **heavy()) as source,
        a_worker("w1", **heavy()) as destination,
        Router(source, "") as there,
        Router(destination, "") as here,
    ):
        expected = await there.ask(1)
        await _fill(there, first=10)
        name = BlockName(chain(ROOT, [5] * LENGTH, 16)[4])

        def flip(engine: Engine) -> None:
            host_cache = engine.scheduler.host_cache
            assert host_cache is not None
            source._loaded.runner.transferable.slot(host_cache._slots[name])[7] ^= 0x10 * is_flipped

        await in_engine(source, flip)
        assert await here.ask(1, pull=await pull_from(source, "")) == expected
        report = here.reports[1]
        end = PullEnd.PULL_END_CORRUPT if is_flipped else PullEnd.PULL_END_WHOLE
        assert (report.end, report.num_blocks) == (end, 4 if is_flipped else BLOCKS)


@pytest.mark.fault(65)
async def test_a_request_that_expires_ends_its_pull_and_frees_its_slots(measured: dict[str, Any]) -> None:
    async with (
        a_worker("w0", **heavy()) as source,
        a_worker("w1", **heavy()) as destination,
        Router(source, "") as there,
        Router(destination, "") as here,
    ):
        expected = await there.ask(1)
        async with held(source, PREFIX_BYTES // 4) as (tap, reached, goes_on):
            order = await pull_from(source, "", address=tap.address, seconds=60.0)
            await here.submit(1, length=LENGTH, sampling={"seed": 7}, pull=order, deadline_seconds=3.0)
            await asyncio.wait_for(reached.wait(), 20)
            while 1 not in (await here.read_until("step")).failed_handles:
                pass
            await check_idle(destination)
            goes_on.set()
            await check_idle(source)
        assert await here.ask(2, pull=await pull_from(source, "")) == expected
        measured.update(failed=0)


@pytest.mark.fault(65)
async def test_preempted_sequences_beside_pulls_get_the_tokens_of_a_worker_alone() -> None:
    """A pool of little more than two of the four requests. The second pull of each prompt finds another one."""
    few = {
        "kv_cache_memory": 29 * BLOCK_BYTES,
        "max_model_len": 400,
        "host_cache_gib": 110 * BLOCK_BYTES / 2**30,
    }
    async with (
        a_worker("w0", **heavy(kv_cache_memory=100 * BLOCK_BYTES)) as source,
        a_worker("w1", **heavy(**few)) as destination,
        Router(source, "") as there,
        Router(destination, "") as here,
    ):
        asked: dict[str, Any] = {"max_tokens": 60, "sampling": {"seed": 7}}
        expected = {handle: await there.ask(handle, token=handle, **asked) for handle in (11, 12, 13, 14)}
        for handle in expected:
            order = await pull_from(source, "")
            await here.submit(handle, length=LENGTH, token=handle, pull=order, **asked)
        assert await here.tokens_of(*expected) == expected
        assert {report.end for report in here.reports.values()} == {PullEnd.PULL_END_WHOLE}
        assert (await in_engine(destination, lambda engine: engine.load())).preemptions > 0
        await check_idle(destination)
        await check_idle(source)


@pytest.mark.fault(68)
async def test_a_source_serves_so_many_pulls_at_once_and_refuses_the_others(measured: dict[str, Any]) -> None:
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(
            a_worker("w0", **heavy(kv_cache_memory=100 * BLOCK_BYTES, lend_share=0.9))
        )
        there = await stack.enter_async_context(Router(source, ""))
        expected = {handle: await there.ask(handle, token=handle) for handle in range(11, 11 + 6)}
        events, sessions = [], []
        for name in ("w1", "w2"):
            changes = {"kv_cache_memory": 80 * BLOCK_BYTES, "host_cache_gib": 80 * BLOCK_BYTES / 2**30}
            worker = await stack.enter_async_context(a_worker(name, **heavy(**changes)))
            sessions.append(await stack.enter_async_context(Router(worker, "")))
        for number, handle in enumerate(expected):
            tap, reached, goes_on = await stack.enter_async_context(held(source, PREFIX_BYTES // 4))
            events.append(goes_on)
            # A source lets the others wait for a part of their time, which is short here.
            seconds = 60.0 if number < MAX_LOANS else 2.0
            order = await pull_from(source, "", address=tap.address, seconds=seconds)
            here = sessions[number % 2]
            await here.submit(handle, length=LENGTH, token=handle, sampling={"seed": 7}, pull=order)
            if number < MAX_LOANS:
                await asyncio.wait_for(reached.wait(), 20)
        late = {handle: sessions[number % 2] for number, handle in enumerate(expected) if number >= MAX_LOANS}
        for handle, here in late.items():
            assert await here.tokens_of(handle) == {handle: expected[handle]}, "it does not wait for them"
            assert here.reports[handle].end == PullEnd.PULL_END_REFUSED
        for event in events:
            event.set()
        for number, here in enumerate(sessions):
            handles = [
                handle for index, handle in enumerate(expected) if index % 2 == number and handle not in late
            ]
            assert await here.tokens_of(*handles) == {handle: expected[handle] for handle in handles}
        ends = [report.end for here in sessions for report in here.reports.values()]
        assert ends.count(PullEnd.PULL_END_WHOLE) == MAX_LOANS
        measured.update(failed=0, note=f"{MAX_LOANS} at once, {len(late)} refused and computed")
        await check_idle(source)


@pytest.mark.fault(69)
async def test_two_workers_that_pull_from_each_other_at_once_both_get_all() -> None:
    async with (
        a_worker("w0", **heavy(kv_cache_memory=100 * BLOCK_BYTES)) as one,
        a_worker("w1", **heavy(kv_cache_memory=100 * BLOCK_BYTES)) as other,
        Router(one, "") as at_one,
        Router(other, "") as at_other,
    ):
        from_one = {handle: await at_one.ask(handle, token=handle) for handle in (11, 12)}
        from_other = {handle: await at_other.ask(handle, token=handle) for handle in (21, 22)}
        for here, wanted, source in ((at_other, from_one, one), (at_one, from_other, other)):
            for handle in wanted:
                order = await pull_from(source, "", seconds=60.0)
                await here.submit(handle, length=LENGTH, token=handle, sampling={"seed": 7}, pull=order)
        assert await asyncio.gather(at_other.tokens_of(*from_one), at_one.tokens_of(*from_other)) == [
            from_one,
            from_other,
        ]
        reports = [*at_one.reports.values(), *at_other.reports.values()]
        assert [report.end for report in reports] == [PullEnd.PULL_END_WHOLE] * 4
        await check_idle(one)
        await check_idle(other)
