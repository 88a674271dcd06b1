"""Blocks that travel between two workers: whatever happens to a transfer, tokens are those of a worker alone."""

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
from blockyard.proto.naming.block_hash import chain, pack_tokens
from blockyard.proto.v1.session_pb2 import PullEnd
from blockyard.worker.scheduling import pulls
from blockyard.worker.transfer import rules

from .pulling import (
    BLOCKS,
    FRAME_BYTES,
    LENGTH,
    Harm,
    Router,
    a_worker,
    bytes_of_blocks,
    check_idle,
    flip_at,
    harmed,
    pull_from,
    transfer_port,
    two_workers,
)
from .serving import BLOCK_BYTES, ROOT, SECRET


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests wait until their pulls have ended, and so hear of each, also where its thread gets no processor."""
    monkeypatch.setattr(pulls, "LATE_SECONDS", 20.0)


@pytest.mark.parametrize("secret", [SECRET, ""])
async def test_a_pulled_prefix_gives_the_same_tokens_and_has_the_same_bits(secret: str) -> None:
    async with two_workers(secret) as (source, destination, there, here):
        expected = await there.ask(1)
        assert await here.ask(1, pull=await pull_from(source, secret)) == expected
        (report,) = here.reports.values()
        assert (report.end, report.num_blocks) == (PullEnd.PULL_END_WHOLE, BLOCKS)
        assert report.num_bytes == BLOCKS * BLOCK_BYTES
        assert here.cached == {1: BLOCKS * 16}
        assert await here.ask(2, pull=await pull_from(source, secret)) == expected
        assert list(here.reports) == [1], "what is here is not fetched again"
        pulled, lent = await bytes_of_blocks(destination), await bytes_of_blocks(source)
        assert len(pulled) == BLOCKS
        assert pulled == lent[:BLOCKS]
        await check_idle(source, destination)


def cut_at(position: int) -> Harm:
    return lambda data, offset: data if offset + len(data) <= position else None


def left_out_at(position: int) -> Harm:
    """The byte at this position is missing."""
    return lambda data, offset: data[: max(position - offset, 0)] + data[max(position - offset + 1, 0) :]


def doubled_at(position: int) -> Harm:
    return lambda data, offset: data if position - offset not in range(len(data)) else data + data


@pytest.mark.fault(62)
@pytest.mark.parametrize("harm", [flip_at, cut_at, left_out_at, doubled_at])
async def test_whatever_happens_to_the_bytes_tokens_are_right_and_nothing_waits(
    harm: Callable[[int], Harm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an answer, and at a boundary of a frame, beside it, and anywhere."""
    monkeypatch.setattr(rules, "AVOIDED_SECONDS", dict.fromkeys(rules.AVOIDED_SECONDS, 0.0))
    boundary = 6 + FRAME_BYTES * 5
    anywhere = random.Random(harm.__name__).randrange(6 + FRAME_BYTES * BLOCKS)
    async with two_workers() as (source, destination, there, here):
        for handle, position in enumerate((0, 5, boundary - 1, boundary + 4, anywhere), start=1):
            token = 5 + handle
            expected = await there.ask(handle, token=token)
            async with harmed(source, harm(position)) as address:
                pull = await pull_from(source, "", address=address, seconds=1.0)
                assert await here.ask(handle, token=token, pull=pull) == expected
            report = here.reports[handle]
            most = BLOCKS if harm is doubled_at else max(position - 6, 0) // FRAME_BYTES
            assert report.num_blocks <= most, position
            assert here.cached[handle] == report.num_blocks * 16
            await check_idle(destination)
        await check_idle(source)


@pytest.mark.fault(68)
async def test_a_slow_source_delays_a_request_no_longer_than_its_pull_may_take() -> None:
    async with two_workers() as (source, destination, there, here):
        expected = await there.ask(1)
        # Each block but the first takes 0.26 s at least, so not all of them can arrive.
        async with harmed(source, delay_seconds=0.02, undelayed_bytes=6 + FRAME_BYTES) as address:
            pull = await pull_from(source, "", address=address, seconds=1.5)
            assert await here.ask(1, pull=pull) == expected
        report = here.reports[1]
        assert report.end == PullEnd.PULL_END_LATE
        assert 0 < report.num_blocks < BLOCKS, "what has arrived is used"
        assert here.cached == {1: report.num_blocks * 16}
        await check_idle(source, destination)


async def test_an_order_that_leads_to_nothing_costs_only_the_computing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "AVOIDED_SECONDS", dict.fromkeys(rules.AVOIDED_SECONDS, 0.0))
    orders: tuple[tuple[dict[str, Any], PullEnd | None], ...] = (
        ({"incarnation": "another"}, PullEnd.PULL_END_REFUSED),
        ({"address": "127.0.0.1:1"}, PullEnd.PULL_END_UNREACHABLE),
        ({"address": "nowhere"}, PullEnd.PULL_END_UNREACHABLE),
        ({"seconds": 1e-9}, PullEnd.PULL_END_LATE),
        ({"num_blocks": 4}, PullEnd.PULL_END_WHOLE),
        ({"num_blocks": 0}, None),
        ({"seconds": 0.0}, None),
    )
    async with two_workers(SECRET) as (source, _, there, here):
        for token, (changes, end) in enumerate(orders, start=5):
            expected = await there.ask(token, token=token)
            assert await here.ask(token, token=token, pull=await pull_from(source, **changes)) == expected
            report = here.reports.get(token)
            assert (None if report is None else report.end) == end, changes


@pytest.mark.fault(63)
@pytest.mark.parametrize(("lend_share", "length"), [(0.25, 100), (0.05, LENGTH)], ids=["lacks", "lends few"])
async def test_a_source_that_lacks_blocks_or_lends_few_sends_those(lend_share: float, length: int) -> None:
    async with two_workers(lending={"lend_share": lend_share}) as (source, _, there, here):
        await there.ask(1, length=length)
        await here.ask(1, pull=await pull_from(source, ""))
        report = here.reports[1]
        assert (report.end, report.num_blocks) == (PullEnd.PULL_END_FEWER, 6)


@pytest.mark.fault(67)
@pytest.mark.parametrize(
    ("other", "end"),
    [
        ({"deterministic": False, "dtype": "bfloat16"}, PullEnd.PULL_END_REFUSED),
        ({"secret": "another"}, PullEnd.PULL_END_UNREACHABLE),
    ],
    ids=["layout", "secret"],
)
async def test_workers_of_other_layouts_or_secrets_lend_nothing(other: dict[str, Any], end: PullEnd) -> None:
    secret = other.get("secret", SECRET)
    async with (
        a_worker("w0", **other) as source,
        a_worker("w1") as destination,
        Router(source, secret) as there,
        Router(destination) as here,
    ):
        await there.ask(1)
        await here.ask(1, pull=await pull_from(source, secret))
        assert here.reports[1].end == end


@pytest.mark.fault(65)
async def test_a_cancelled_request_ends_its_pull_and_frees_its_slots() -> None:
    async with two_workers() as (source, destination, there, here):
        await there.ask(1)
        async with harmed(source, delay_seconds=0.2) as address:
            pull = await pull_from(source, "", address=address, seconds=30.0)
            await here.submit(1, length=LENGTH, pull=pull)
            await asyncio.sleep(0.3)
            here.call.cancel()
        await check_idle(destination, source)


@pytest.mark.fault(69)
async def test_two_requests_for_one_prefix_wait_for_one_pull() -> None:
    async with two_workers() as (source, _, there, here):
        expected = await there.ask(1)
        async with harmed(source, delay_seconds=0.005) as address:
            pull = await pull_from(source, "", address=address)
            for handle in (1, 2):
                await here.submit(handle, length=LENGTH, sampling={"seed": 7}, pull=pull)
            assert await here.tokens_of(1, 2) == {1: expected, 2: expected}
            assert list(here.reports) == [1]
            assert here.cached == {1: BLOCKS * 16, 2: BLOCKS * 16}


async def test_a_transfer_port_closes_on_what_is_no_request() -> None:
    async with a_worker("w0", secret="") as worker:
        port = await transfer_port(worker, "")
        for sent in (b"\xff" * 8, b"\x03\0\0\0\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
        await check_idle(worker)


async def test_a_replay_fetches_blocks_of_generated_tokens_and_publishes_each_stride() -> None:
    lending = {"lend_share": 0.5}
    async with two_workers(lending=lending, index_stride_tokens=32) as (source, destination, there, here):
        published: set[bytes] = set()
        destination._service.on_changes = lambda result: published.update(result.changes.anywhere_stored)
        generated = await there.ask(1, max_tokens=60)
        tokens = [5] * LENGTH + generated[:40]
        pull = await pull_from(source, "", num_blocks=(len(tokens) - 1) // 16)
        following = await here.ask(1, max_tokens=60, token_ids=pack_tokens(tokens), pull=pull)
        assert following[-20:] == generated[40:]
        assert here.reports[1].num_blocks == 14
        assert here.cached == {1: LENGTH}, "generated tokens are no tokens of the prompt"
        assert published == set(chain(ROOT, [5] * LENGTH + generated[:-1], 16)[1::2])
        await check_idle(destination)


async def test_a_request_that_waits_for_the_pull_of_another_then_fetches_its_own_blocks() -> None:
    async with (
        two_workers(lending={"lend_share": 0.5}) as (source, destination, there, here),
        harmed(source, delay_seconds=0.002) as address,
    ):
        other = [5] * 96 + [6] * 104
        names = b"".join((ROOT, *chain(ROOT, other, 16)))
        changes: dict[int, dict[str, Any]] = {
            1: {},
            2: {"token_ids": pack_tokens(other), "block_names": names},
        }
        expected = {handle: await there.ask(handle, **changes[handle]) for handle in changes}
        pull = await pull_from(source, "", address=address)
        for handle in changes:
            await here.submit(handle, length=LENGTH, sampling={"seed": 7}, pull=pull, **changes[handle])
        assert await here.tokens_of(1, 2) == expected
        assert {handle: report.num_blocks for handle, report in here.reports.items()} == {1: 12, 2: 6}
        assert here.cached == {1: BLOCKS * 16, 2: BLOCKS * 16}
        await check_idle(destination)
