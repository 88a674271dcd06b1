"""Rows 62, 63, 65 and 67 to 70: what happens to blocks and requests at both ends of a pull, and sources that lie."""

import asyncio
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from blockyard.proto.naming.block_hash import chain
from blockyard.proto.security.peer_sockets import SESSION_NAME
from blockyard.proto.v1.session_pb2 import PullEnd, PullReply
from blockyard.worker.engine import Engine
from blockyard.worker.scheduling.pulls import PullOrder
from blockyard.worker.sequences.identifiers import BlockName, TenantId
from blockyard.worker.server import WorkerServer

from tests.unit.worker.checkpoints import make_checkpoint, shared_checkpoint
from tests.unit.worker.scheduling import make_scheduler, make_sequence, run, run_to_end
from tests.unit.worker.test_session import ROOT
from tests.unit.worker.test_transfer import (
    BLOCKS,
    FRAME_BYTES,
    LENGTH,
    Router,
    a_worker,
    check_idle,
    flip_at,
    harmed,
    pull_from,
    transfer_port,
)

T = TypeVar("T")


async def in_engine(worker: WorkerServer, command: Callable[[Engine], T]) -> T:
    return await asyncio.wrap_future(worker._engine.call(command))


@pytest.mark.fault(63)
def test_only_computed_blocks_are_lent() -> None:
    scheduler = make_scheduler(20)
    sequence = make_sequence(1, list(range(1, 50)))
    scheduler.submit(sequence)
    plan = scheduler.plan()
    assert not len(scheduler.tables.lend(sequence.names[1:])), "the step that computes them has not ended"
    scheduler.commit(plan, run(plan))
    loan = scheduler.tables.lend(sequence.names[1:])
    assert len(loan) == 3
    scheduler.tables.end_loan(loan)


@pytest.mark.fault(65)
async def test_a_request_goes_on_without_a_pull_that_does_not_end() -> None:
    async with a_worker("w0", secret="") as source, a_worker("w1", secret="") as destination:
        destination._loaded.engine.start_pull = lambda pull: None
        async with Router(source, "") as there, Router(destination, "") as here:
            expected = await there.ask(1)
            assert await here.ask(1, pull=await pull_from(source, "", seconds=0.5)) == expected
            assert here.cached == {1: 0}


@pytest.mark.fault(65)
def test_blocks_whose_prefix_was_flushed_in_the_pull_are_not_kept() -> None:
    scheduler = make_scheduler(20, host_cache_blocks=20)
    host_cache = scheduler.host_cache
    assert host_cache is not None
    scheduler.submit(make_sequence(1, list(range(1, 34)), max_tokens=1))
    run_to_end(scheduler)
    scheduler.submit(make_sequence(3, list(range(1000, 1310)), max_tokens=1))
    run_to_end(scheduler)
    sequence = make_sequence(2, list(range(1, 100)))
    scheduler.submit(sequence)
    order = PullOrder(address="", incarnation="", num_blocks=6, seconds=1.0)
    pull = scheduler.pulls.begin(sequence, order, now=0.0)
    assert pull is not None
    assert (len(pull.head.host_names), len(pull.slots)) == (2, 4), "its beginning is in host memory"
    host_cache.clear()
    scheduler.cache.flush()
    scheduler.pulls.end(pull, 4)
    assert not len(host_cache), "no prompt could reach them"
    run_to_end(scheduler)


@pytest.mark.fault(67)
@pytest.mark.parametrize("other", ["seed", "block_size", "dtype", "kv_cache_dtype", "heads"])
async def test_a_worker_of_another_layout_or_model_lends_nothing(
    other: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The names are those of the destination, as if they hid the difference."""
    changes: dict[str, Any] = {
        "seed": {"model": str(make_checkpoint(tmp_path, "LlamaForCausalLM", seed=1))},
        "block_size": {"block_size": 32},
        "dtype": {"dtype": "bfloat16", "deterministic": False},
        "kv_cache_dtype": {"kv_cache_dtype": "int8", "deterministic": False},
        "heads": {"model": str(shared_checkpoint("LlamaForCausalLM", num_key_value_heads=4))},
    }[other]
    async with a_worker("w0", secret="", **changes) as source, a_worker("w1", secret="") as destination:
        async with Router(source, "") as there, Router(destination, "") as here:
            if other != "block_size":
                await there.ask(1)
            await here.ask(1, pull=await pull_from(source, ""))
            assert (here.reports[1].end, here.reports[1].num_blocks) == (PullEnd.PULL_END_REFUSED, 0)
        assert "LAYOUT" in caplog.text


@pytest.mark.fault(70)
async def test_pulled_blocks_are_on_the_account_of_the_tenant_whose_prefix_it_is() -> None:
    """The second tenant's prompt goes on where the first one's has ended, so what it pulls is the first one's too."""
    async with a_worker("w0", secret="") as source, a_worker("w1", secret="") as destination:
        async with Router(source, "") as there, Router(destination, "") as here:
            for handle, token in ((1, 5), (2, 6)):
                await there.ask(handle, token=token)
            await here.ask(1, length=100, tenant=7)
            await here.ask(2, pull=await pull_from(source, ""), tenant=8)
            await here.ask(3, token=6, pull=await pull_from(source, ""), tenant=9)
            assert here.reports[2].num_blocks == BLOCKS - 6
        for token, tenant in ((5, 7), (6, 9)):
            names = [BlockName(name) for name in chain(ROOT, [token] * LENGTH, 16)]

            def owners(engine: Engine, names: list[BlockName] = names) -> set[TenantId | None]:
                cache, host_cache = engine.cache, engine.scheduler.host_cache
                assert host_cache is not None
                return {owner(name) for name in names for owner in (cache.owner, host_cache.owner)} - {None}

            assert await in_engine(destination, owners) == {TenantId(tenant)}


def _message(reply: PullReply) -> bytes:
    data = reply.SerializeToString()
    return struct.pack("<I", len(data)) + data


def _block(index: int, *, content: bytes = bytes(FRAME_BYTES - 8)) -> bytes:
    return struct.pack("<II", index, zlib.crc32(content)) + content


@pytest.mark.fault(62)
@pytest.mark.parametrize(
    ("answer", "num_blocks"),
    [
        (_message(PullReply(num_blocks=BLOCKS + 1)) + b"".join(map(_block, range(BLOCKS + 1))), 0),
        (_message(PullReply(num_blocks=2**32 - 1)), 0),
        (_message(PullReply(num_blocks=BLOCKS)) + _block(1) + _block(0), 0),
        (_message(PullReply(num_blocks=BLOCKS)) + _block(0) + _block(0), 1),
        (_message(PullReply(num_blocks=BLOCKS)) + _block(0) + _block(2), 1),
        (b"\xff\xff\xff\xff", 0),
        (b"\x02\0\0\0\xff\xff", 0),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", 0),
    ],
    ids=[
        "one too many",
        "billions",
        "out of order",
        "doubled",
        "one left out",
        "length",
        "no message",
        "HTTP",
    ],
)
async def test_a_source_that_answers_nonsense_is_found_out_and_avoided(
    answer: bytes, num_blocks: int
) -> None:
    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(answer)

    async with (
        a_worker("w1", secret="", deterministic=False) as destination,
        Router(destination, "") as here,
        await asyncio.start_server(lie, "127.0.0.1", 0) as server,
    ):
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        order = await pull_from(destination, "", address=address)
        for handle, end, count in (
            (1, PullEnd.PULL_END_CORRUPT, num_blocks),
            (2, PullEnd.PULL_END_AVOIDED, 0),
        ):
            await here.ask(handle, token=handle + 10, pull=order)
            assert (here.reports[handle].end, here.reports[handle].num_blocks) == (end, count)
        await check_idle(destination)


@pytest.mark.fault(62)
async def test_a_source_whose_bits_flip_is_avoided_and_others_are_not() -> None:
    async with (
        a_worker("w0", secret="") as source,
        a_worker("w1", secret="") as destination,
        Router(source, "") as there,
        Router(destination, "") as here,
    ):
        expected = {handle: await there.ask(handle, token=handle) for handle in (11, 12, 13)}
        async with harmed(source, flip_at(FRAME_BYTES)) as address:
            harmful = await pull_from(source, "", address=address)
            for handle, end in ((11, PullEnd.PULL_END_CORRUPT), (12, PullEnd.PULL_END_AVOIDED)):
                assert await here.ask(handle, token=handle, pull=harmful) == expected[handle]
                assert here.reports[handle].end == end
        assert await here.ask(13, token=13, pull=await pull_from(source, "")) == expected[13]
        assert here.reports[13].end == PullEnd.PULL_END_WHOLE


@pytest.mark.fault(68)
async def test_forty_workers_stay_connected_to_one_source() -> None:
    """Each keeps its connection with TLS open for its next pull."""
    async with a_worker("w0") as source:
        contexts = source._exchange._lender._context
        assert contexts is not None
        port = await transfer_port(source)
        opened = [
            await asyncio.open_connection(
                "127.0.0.1", port, ssl=contexts(False), server_hostname=SESSION_NAME
            )
            for _ in range(40)
        ]
        await asyncio.sleep(0.2)
        assert not any(reader.at_eof() for reader, _ in opened)
        for _, writer in opened:
            writer.close()
