"""A process's calls to the index twin: delayed, refused, hung, or with the reply lost.

As on a real server, a call may still be executed after its caller hung up, later and in another order. Does not own the
rules of the index (proto/index/twin.py).
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeVar

from blockyard.proto.index.contract import (
    MAX_LISTED,
    ApplyResult,
    Batch,
    Berth,
    DirectoryPage,
    ErrorKind,
    Holder,
    IndexInfo,
    PrefixIndexError,
    PurgeProgress,
    RenewResult,
    SpotCheck,
    WorkerRecord,
)
from blockyard.proto.index.twin import TwinPrefixIndex

from simulation.network import Network

Reply = TypeVar("Reply")


class IndexState(Enum):
    UP = auto()
    DOWN = auto()
    """Refuses calls at once."""
    HUNG = auto()
    """Accepts calls, and executes them in any order once it is up again."""


def answer(work: Coroutine[Any, Any, Reply]) -> Reply:
    """Run a coroutine of the twin and return its result. The twin never waits."""
    try:
        work.send(None)
    except StopIteration as stop:
        reply: Reply = stop.value
        return reply
    raise AssertionError("the twin waits for something")


@dataclass(slots=True)
class IndexServer:
    """The twin as a server in the network, which can be down or hang."""

    twin: TwinPrefixIndex
    network: Network
    state: IndexState = IndexState.UP
    latency_seconds: float = 0.0003
    jitter_seconds: float = 0.0
    lost_replies: float = 0.0
    """Share of the calls that are executed but not answered."""
    _hung: list[Callable[[], None]] = field(default_factory=list)

    def set_state(self, state: IndexState) -> None:
        self.state = state
        if state is IndexState.UP:
            hung, self._hung = self._hung, []
            self.network.chance.shuffle(hung)
            for action in hung:
                action()

    async def ask(self, work: Callable[[], Coroutine[Any, Any, Reply]]) -> Reply:
        """Execute a call as a server would, and return its reply. Raises PrefixIndexError if the server is down or the
        reply lost."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.network.later(self._delay(), lambda: self._arrived(work, future))
        return await future

    def _arrived(
        self, work: Callable[[], Coroutine[Any, Any, Reply]], future: "asyncio.Future[Reply]"
    ) -> None:
        match self.state:
            case IndexState.UP:
                self._do(work, future)
            case IndexState.HUNG:
                self._hung.append(lambda: self._do(work, future))
            case IndexState.DOWN:
                self._reply(future, error=PrefixIndexError(ErrorKind.CONNECTION, "refused"))

    def _do(self, work: Callable[[], Coroutine[Any, Any, Reply]], future: "asyncio.Future[Reply]") -> None:
        try:
            reply = answer(work())
        except PrefixIndexError as error:
            self._reply(future, error=error)
            return
        if self.network.chance.random() < self.lost_replies:
            self._reply(future, error=PrefixIndexError(ErrorKind.CONNECTION, "the answer was lost"))
        else:
            self.network.later(self._delay(), lambda: _set_reply(future, reply))

    def _reply(self, future: "asyncio.Future[Reply]", *, error: PrefixIndexError) -> None:
        self.network.later(self._delay(), lambda: _fail(future, error))

    def _delay(self) -> float:
        return self.latency_seconds + self.jitter_seconds * self.network.chance.random()


def _set_reply(future: "asyncio.Future[Reply]", reply: Reply) -> None:
    """Set the reply, unless the caller is gone."""
    if not future.done():
        future.set_result(reply)


def _fail(future: "asyncio.Future[Reply]", error: PrefixIndexError) -> None:
    if not future.done():
        future.set_exception(error)


class RemoteIndex:
    """A PrefixIndex whose calls go to an IndexServer."""

    def __init__(self, server: IndexServer) -> None:
        self._server = server
        self._twin = server.twin

    async def register(
        self, record: WorkerRecord, *, lease_seconds: float, has_host_cache: bool = False
    ) -> Berth:
        return await self._server.ask(
            lambda: self._twin.register(record, lease_seconds=lease_seconds, has_host_cache=has_host_cache)
        )

    async def apply(self, berth: Berth, batch: Batch) -> ApplyResult:
        return await self._server.ask(lambda: self._twin.apply(berth, batch))

    async def renew(
        self,
        berth: Berth,
        *,
        lease_seconds: float,
        applied_sequence: int = 0,
        check: SpotCheck | None = None,
    ) -> RenewResult:
        return await self._server.ask(
            lambda: self._twin.renew(
                berth, lease_seconds=lease_seconds, applied_sequence=applied_sequence, check=check
            )
        )

    async def retire(self, berth: Berth) -> None:
        await self._server.ask(lambda: self._twin.retire(berth))

    async def lookup(
        self, names: Sequence[bytes], *, most: int = MAX_LISTED, expects_workers: bool = False
    ) -> list[Holder]:
        return await self._server.ask(
            lambda: self._twin.lookup(names, most=most, expects_workers=expects_workers)
        )

    async def directory(self) -> list[WorkerRecord]:
        return await self._server.ask(self._twin.directory)

    async def directory_page(self, after: int = 0) -> DirectoryPage:
        return await self._server.ask(lambda: self._twin.directory_page(after))

    async def purge(self, *, slice_buckets: int = 64) -> PurgeProgress:
        return await self._server.ask(lambda: self._twin.purge(slice_buckets=slice_buckets))

    async def info(self) -> IndexInfo:
        return await self._server.ask(self._twin.info)
