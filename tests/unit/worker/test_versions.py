"""A worker with routers of other versions."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from blockyard.proto.v1.admin_pb2 import DrainWorkerRequest
from blockyard.proto.v1.session_pb2 import Ping, RejectReason, ToRouter, ToWorker
from blockyard.worker.server import WorkerServer
from google.protobuf.message import Message

from tests.unit.proto.old_session import UNKNOWN, as_newer, as_old, old_class

from .serving import Session, assert_refused, serving


class Other(Session):
    """A router that writes and reads in its own way."""

    def __init__(self, address: str, write: Callable[[Message], bytes], read: Callable[[bytes], Any]) -> None:
        super().__init__(address)
        self.call.cancel()
        self.call = self.channel.stream_stream("/blockyard.v1.EngineService/Session")()
        self._write, self._read = write, read

    async def write(self, **message: Any) -> None:
        await self.call.write(self._write(ToWorker(**message)))

    async def read(self) -> Any:
        data = await self.call.read()
        assert isinstance(data, bytes), "the stream has ended"
        return self._read(data)


@pytest.fixture
async def worker() -> AsyncIterator[WorkerServer]:
    async with serving() as worker:
        yield worker


def parsed_by_older(data: bytes) -> Any:
    return old_class("ToRouter").FromString(data)


@pytest.mark.parametrize(
    ("write", "read"), [(as_old, parsed_by_older), (as_newer, ToRouter.FromString)], ids=["older", "newer"]
)
async def test_a_router_of_another_version_is_served_through_a_drain(
    worker: WorkerServer, write: Callable[[Message], bytes], read: Callable[[bytes], Any]
) -> None:
    async with Other(worker.address, write, read) as router, Session(worker.address) as operator:
        hello = await router.read_until("hello")
        assert hello.worker_id == "worker-0"
        await router.submit(1)
        assert [len(tokens) for tokens in (await router.tokens_of(1)).values()] == [6]
        await router.write(ping=Ping(nonce=4))
        assert (await router.read_until("pong")).nonce == 4
        await operator.stub.DrainWorker(DrainWorkerRequest(grace_seconds=1))
        await router.submit(2)
        assert (await router.read_until("rejected")).reason == RejectReason.REJECT_REASON_DRAINING


async def test_a_word_that_only_newer_routers_say_is_passed_over_and_an_empty_one_is_not(
    worker: WorkerServer,
) -> None:
    async with Other(worker.address, bytes, ToRouter.FromString) as router:
        await router.call.write(UNKNOWN)
        await router.call.write(as_newer(ToWorker(ping=Ping(nonce=4))))
        assert (await router.read_until("pong")).nonce == 4
        await router.call.write(b"")
        # The status comes behind the last message, and the worker may have sent one meanwhile.
        await assert_refused(router.read_until("the end"), grpc.StatusCode.INVALID_ARGUMENT)
