"""Guarantees of a link to the worker at its other end, and to the other tasks on its event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from blockyard.proto.v1 import session_pb2
from blockyard.router.cluster.events import Event, Tokens
from blockyard.router.cluster.link import CHANNEL_OPTIONS, ROWS_PER_TICK, EngineLink, LinkEvents

from simulation.virtual_time import Process, VirtualLoop, bury

from .fake_worker import FakeWorker, open_session
from .rig import nothing_left_to_the_collector, until

MESSAGE_BYTES = 1024
NUM_ROWS = 20 * ROWS_PER_TICK


async def test_a_router_that_reads_nothing_holds_the_workers_writes_back_soon() -> None:
    """Else steps pile up inside gRPC, where the worker cannot merge them."""
    num_written = 0

    async def flood(request: bytes, context: Any) -> AsyncIterator[bytes]:
        nonlocal num_written
        while True:
            yield b"x" * MESSAGE_BYTES
            num_written += 1

    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler(
        "T", {"Flood": grpc.unary_stream_rpc_method_handler(flood)}
    )
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
            call = channel.unary_stream("/T/Flood")(b"")
            for _ in range(2000):
                await call.read()
            num_read = 2000
            await asyncio.sleep(0.5)
            written_at_rest = num_written
            await asyncio.sleep(0.2)
            assert num_written == written_at_rest, "the writer still writes"
            ahead = written_at_rest - num_read
            print(f"{ahead} messages of {MESSAGE_BYTES} bytes were written ahead of a reader that stopped")
            assert ahead * MESSAGE_BYTES <= 256 * 1024
            call.cancel()
    finally:
        await server.stop(None)


class OneLargeStep(FakeWorker):
    """Answers all requests at once."""

    def _submit(self, stream: Any, submit: session_pb2.Submit) -> None:
        self.submits.append(submit)
        if len(self.submits) == NUM_ROWS:
            zeros = [0] * NUM_ROWS
            step = session_pb2.StepOutput(
                handles=[submit.handle for submit in self.submits],
                token_offsets=zeros,
                token_counts=[1] * NUM_ROWS,
                token_ids=range(NUM_ROWS),
                finish_reasons=[1] * NUM_ROWS,
                stop_tokens=zeros,
                cached_tokens=zeros,
            )
            stream.send(step=step)


class Accepting(LinkEvents):
    def accept(self, address: str, hello: session_pb2.Hello) -> None:
        return None

    def heard(self, address: str, load: Any, last_handle: int | None = None) -> None:
        pass

    def disconnected(self, address: str, reason: str) -> None:
        pass


async def test_a_large_step_is_dealt_out_in_order_over_many_ticks_of_the_loop() -> None:
    ticks = 0
    dealt: list[tuple[int, int]] = []

    async def count_ticks() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    def sink(event: Event) -> None:
        assert isinstance(event, Tokens)
        dealt.append((ticks, event.token_ids[0]))

    async with OneLargeStep("a") as worker, asyncio.TaskGroup() as tasks:
        link = EngineLink(worker.address, Accepting(), lost_seconds=5.0, open_channel=open_session)
        running = [tasks.create_task(link.run())]
        await until(lambda: link.is_up)
        for _ in range(NUM_ROWS):
            link.submit(session_pb2.Submit(), sink)
        running.append(tasks.create_task(count_ticks()))
        await until(lambda: len(dealt) == NUM_ROWS)
        link.stop()
        for task in running:
            task.cancel()
    assert [token for _, token in dealt] == list(range(NUM_ROWS))
    most_in_a_tick = max(sum(tick == other for other, _ in dealt) for tick, _ in dealt)
    assert most_in_a_tick <= ROWS_PER_TICK


async def test_links_that_were_given_up_leave_nothing_to_the_garbage_collector() -> None:
    """Held by the frames of what ended it, a call keeps its connection open until the collector comes by."""
    with nothing_left_to_the_collector(grpc.aio.StreamStreamCall):
        for _ in range(2):
            async with FakeWorker("a") as worker, asyncio.TaskGroup() as tasks:
                link = EngineLink(worker.address, Accepting(), lost_seconds=0.2, open_channel=open_session)
                running = tasks.create_task(link.run())
                await until(lambda link=link: link.is_up)
                worker.hang()
                await until(lambda link=link: not link.is_up, seconds=20)
                link.stop()
                running.cancel()


class SilentChannel:
    """Channel to a worker that greets and then says nothing.

    Has the parts of grpc.aio.Channel and of its call that a link uses.
    """

    def __init__(self) -> None:
        self.words: asyncio.Queue[session_pb2.ToRouter] = asyncio.Queue()
        self.words.put_nowait(session_pb2.ToRouter(hello=session_pb2.Hello()))

    def stream_stream(self, method: str, **_: object) -> Any:
        return lambda **_: self

    def unary_unary(self, method: str, **_: object) -> None:
        return None

    unary_stream = unary_unary

    async def read(self) -> session_pb2.ToRouter:
        return await self.words.get()

    async def write(self, message: session_pb2.ToWorker) -> None:
        pass

    def cancel(self) -> None:
        pass


def losses(*, talks: bool, is_frozen: bool) -> list[tuple[float, str]]:
    """Return when and why a link ends within three seconds, or six of which its process is frozen for four.

    A worker that talks says something every half second.
    """
    loop, channel = VirtualLoop(), SilentChannel()
    began, lost = loop.time(), []
    router = Process("router", loop)

    class Losing(Accepting):
        def disconnected(self, address: str, reason: str) -> None:
            lost.append((loop.time() - began, reason))

    @asynccontextmanager
    async def open_channel(address: str) -> AsyncIterator[Any]:
        yield channel

    async def talk() -> None:
        while talks:
            await asyncio.sleep(0.5)
            channel.words.put_nowait(session_pb2.ToRouter(pong=session_pb2.Pong()))

    async def run() -> None:
        link = EngineLink("a", Losing(), lost_seconds=2.2, clock=loop.time, open_channel=open_channel)
        router.start(link.run())
        talking = asyncio.create_task(talk())
        await asyncio.sleep(1)
        if is_frozen:
            router.freeze()
            await asyncio.sleep(4)
            router.thaw()
            await asyncio.sleep(1)
        else:
            await asyncio.sleep(2)
        talking.cancel()

    try:
        loop.run_until_complete(run())
    finally:
        bury(loop, [router])
        loop.close()
    assert router.failures == []
    return lost


@pytest.mark.parametrize(
    ("talks", "is_frozen", "lost_at"),
    # A silent worker is given up when its time is over, and not at the next ping. A router that stood still gives up
    # those alone that said nothing meanwhile.
    [(False, False, [2.2]), (True, True, []), (False, True, [5.5])],
)
def test_a_worker_is_given_up_for_its_own_silence_alone(talks: bool, is_frozen: bool, lost_at: list[float]):
    expected = [(pytest.approx(seconds, abs=0.01), "silent for 2.2 s") for seconds in lost_at]
    assert losses(talks=talks, is_frozen=is_frozen) == expected
