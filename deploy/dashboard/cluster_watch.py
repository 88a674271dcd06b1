"""Watches one cluster for the live page: asks any of its routers with a deadline, and keeps the latest snapshot.

Owns connections, the choice of the router, and how often it is asked. A frozen or absent router costs one deadline
once, because later questions go to another router first. All open pages share one snapshot.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from blockyard.deploy.dashboard import prefix_tree, snapshot
from blockyard.deploy.dashboard.announcement import Announcement
from blockyard.deploy.dashboard.connection import ASK_SECONDS, CannotReach, client_of, failure_text, ordered
from blockyard.deploy.dashboard.history import History
from blockyard.deploy.dashboard.last_seen import COUNTERS, LastSeen, Rates
from blockyard.proto.runtime.tasks import BackgroundTasks
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import AsyncClient, BlockyardError, TimedOutError, UnavailableError

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
MAX_ROUTERS = 32
"""Limit on the routers that are asked at once, each for its own requests or numbers."""
ALL_SECONDS = 4.0
"""Deadline of a question to one router after another, until one answers."""
FRESH_SECONDS = 0.8
"""Age up to which a picture is shown again, instead of a new one."""
PICTURE_SECONDS = 2.0
"""Longest wait for a new picture while there is an older one."""
FRESH_TREE_SECONDS = 5.0
"""Age up to which a tree of prefixes is shown again. Building one reads every block of every pool."""
READ_SECONDS = 6.0
READ_AT_ONCE = 8
"""Limit on the workers whose blocks are read at once."""
BUSY_SHARE = 0.25
"""Largest share of a core that drawing large pools may use on the dashboard's node."""
NO_PICTURE = "the picture cannot be drawn; the dashboard's log dashboard_BlockyardHead.log says why"


Requests = Mapping[str, Sequence[cluster_pb2.RequestInfo] | None]
"""Requests by the address of their router; None for a router that does not answer."""


class _Shared(Generic[Answer]):
    """One answer that concurrent callers share.

    It is computed again after `fresh_seconds`, or later if computing it takes long.
    """

    def __init__(
        self, make: Callable[[], Coroutine[Any, Any, Answer]], fresh_seconds: float, tasks: BackgroundTasks
    ) -> None:
        self._make, self._fresh_seconds, self._tasks = make, fresh_seconds, tasks
        self._making: asyncio.Task[Answer] | None = None
        self._made_at, self._took_seconds = float("-inf"), 0.0

    async def get(self) -> Answer:
        is_stale = time.monotonic() - self._made_at > max(
            self._fresh_seconds, self._took_seconds / BUSY_SHARE
        )
        if self._making is None or (self._making.done() and is_stale):
            self._making = self._tasks.start(self._timed(), name=self._make.__name__)
        return await asyncio.shield(self._making)

    async def _timed(self) -> Answer:
        began = time.monotonic()
        try:
            return await self._make()
        finally:
            self._made_at = time.monotonic()
            self._took_seconds = self._made_at - began


class ClusterWatch:
    """Connections to one cluster's routers and its latest picture, on one event loop."""

    def __init__(self, announcement: Announcement) -> None:
        self.announcement = announcement
        self._clients: dict[str, AsyncClient] = {}
        self._answered: str | None = None
        self._picture: dict[str, Any] | None = None
        self._last_seen = LastSeen()
        self._rates = Rates()
        self._drawn_at = float("-inf")
        self._drawing_seconds = 0.0
        self._drawing: asyncio.Task[None] | None = None
        self._tasks = BackgroundTasks(on_failure=None)
        self._requests = _Shared(self._list_requests, FRESH_SECONDS, self._tasks)
        self._pulls = _Shared(self._list_pulls, FRESH_SECONDS, self._tasks)
        self._prefixes = _Shared(self._build_prefixes, FRESH_TREE_SECONDS, self._tasks)
        self.history = History()

    async def close(self) -> None:
        await self._tasks.aclose()
        await self._forget(*self._clients)

    async def heard(self, announcement: Announcement) -> None:
        """Take the supervisor's new announcement, and close connections to routers that have gone."""
        self.announcement = announcement
        await self._forget(*(self._clients.keys() - set(announcement.routers)))

    async def _forget(self, *addresses: str) -> None:
        # Remove all before the first await, because another task may forget the same addresses meanwhile.
        for client in [self._clients.pop(address) for address in addresses]:
            await client.close()

    # Asking

    async def ask(
        self, question: Callable[[AsyncClient], Awaitable[Answer]], *, seconds: float = ALL_SECONDS
    ) -> Answer:
        """Ask routers in turn, until one answers or the time is over, and return the answer.

        Raise CannotReach if no router can be asked. Raise BlockyardError if all are silent, or one refuses.
        """
        failure: BlockyardError | None = None
        try:
            async with asyncio.timeout(seconds):
                for address in ordered(self.announcement.routers, self._answered):
                    try:
                        answer = await question(self._client(address))
                    except (UnavailableError, TimedOutError) as error:
                        failure = error
                    else:
                        self._answered = address
                        return answer
        except TimeoutError:
            pass
        raise failure or CannotReach("no router serves")

    async def ask_each(
        self, question: Callable[[AsyncClient], Awaitable[Answer]]
    ) -> dict[str, Answer | None]:
        """Ask up to MAX_ROUTERS routers at once. Return answers by address, None for a router that does not answer."""

        async def asked(address: str) -> Answer | None:
            try:
                return await question(self._client(address))
            except (BlockyardError, CannotReach):
                return None

        addresses = self.announcement.routers[:MAX_ROUTERS]
        return dict(zip(addresses, await asyncio.gather(*map(asked, addresses)), strict=True))

    async def requests(self) -> Requests:
        """List every router's requests. All browsers share one list, renewed every FRESH_SECONDS at most."""
        return await self._requests.get()

    async def pulls(self) -> dict[str, Any]:
        """List the last pulls of all routers. All browsers share one list, renewed every FRESH_SECONDS at most."""
        return await self._pulls.get()

    async def prefixes(self) -> dict[str, Any]:
        """Return the tree of cached prefixes. All browsers share one, renewed every FRESH_TREE_SECONDS at most."""
        return await self._prefixes.get()

    async def _list_requests(self) -> Requests:
        return await self.ask_each(lambda client: client.list_requests())

    async def _list_pulls(self) -> dict[str, Any]:
        return snapshot.pulls_dict(await self.ask_each(lambda client: client.cluster_info()))

    async def _build_prefixes(self) -> dict[str, Any]:
        workers = await self.ask(lambda client: client.list_workers())
        answering = [worker.worker_id for worker in workers if worker.state in snapshot.ANSWERING]
        reading = asyncio.Semaphore(READ_AT_ONCE)

        async def blocks_of(worker: str) -> list[cluster_pb2.Block] | None:
            try:
                async with asyncio.timeout(READ_SECONDS), reading:
                    return await self.ask(
                        lambda client: client.list_blocks(worker, limit=prefix_tree.MAX_BLOCKS),
                        seconds=READ_SECONDS,
                    )
            except (BlockyardError, CannotReach, TimeoutError):
                return None

        found = await asyncio.gather(*map(blocks_of, answering))
        return await asyncio.to_thread(prefix_tree.prefix_tree, dict(zip(answering, found, strict=True)))

    async def look(self) -> None:
        """Ask the routers for their numbers, and add a point to the history. Add none if no router answers."""
        infos = await self.ask_each(lambda client: client.cluster_info())
        with suppress(BlockyardError, CannotReach):
            workers = await self.ask(lambda client: client.list_workers())
            known = {address: info for address, info in infos.items() if info is not None}
            self.history.look(time.monotonic(), known, workers)

    def _client(self, address: str) -> AsyncClient:
        if address not in self._clients:
            self._clients[address] = client_of(address, self.announcement, os.environ)
        return self._clients[address]

    def error_text(self, error: Exception) -> str:
        """Return the text that the page shows for an error of `ask`."""
        return failure_text(error, self.announcement) if isinstance(error, BlockyardError) else str(error)

    # Drawing

    async def latest(self) -> dict[str, Any]:
        """Return the latest picture, with its age and the history.

        Draw it again first if it is old, but wait only PICTURE_SECONDS if there is one.
        """
        pause_seconds = max(FRESH_SECONDS, self._drawing_seconds / BUSY_SHARE)
        if self._drawing is None and time.monotonic() - self._drawn_at > pause_seconds:
            self._drawing = self._tasks.start(self._draw(), name="picture")
        if self._drawing is not None:
            timeout_seconds = PICTURE_SECONDS if self._picture else ALL_SECONDS + 2 * ASK_SECONDS
            await asyncio.wait((self._drawing,), timeout=timeout_seconds)
        age_seconds = time.monotonic() - self._drawn_at
        return {
            **(self._picture or snapshot.of_nothing(self.announcement)),
            "age_seconds": min(age_seconds, 1e6),
            "history": self.history.as_dict(time.monotonic()),
        }

    async def _draw(self) -> None:
        try:
            seen = await self._seen()
            is_router_up = seen["info"] is not None
            workers = self._last_seen.completed(seen["workers"], time.time(), is_router_up=is_router_up)
            self._picture = self._with_rates(seen | {"workers": workers})
        except Exception:
            logger.exception("the picture of cluster %s cannot be drawn", self.announcement.cluster)
            self._picture = snapshot.of_nothing(self.announcement, trouble=NO_PICTURE)
        finally:
            self._drawing = None
        self._drawn_at = time.monotonic()

    def _with_rates(self, seen: dict[str, Any]) -> dict[str, Any]:
        pools = {card["name"]: card["pool"] for card in seen["workers"] if card["pool"] is not None}
        sources: dict[Hashable, dict[str, int]] = {
            (name, pool["incarnation"]): {counter: pool[counter] for counter in COUNTERS}
            for name, pool in pools.items()
        }
        if seen["info"] is not None:
            sources[seen["router"]] = {"migrations": seen["info"]["migrations"]}
        rates = self._rates.per_minute(time.monotonic(), sources)
        for name, pool in pools.items():
            pool["per_minute"] = rates[name, pool["incarnation"]]
        return seen | {"per_minute": rates.get(seen["router"], {})}

    async def _seen(self) -> dict[str, Any]:
        try:
            info, workers = await asyncio.gather(
                self.ask(lambda client: client.cluster_info()), self.ask(lambda client: client.list_workers())
            )
        except (BlockyardError, CannotReach) as error:
            return snapshot.of_nothing(self.announcement, trouble=self.error_text(error))
        answers = await asyncio.gather(*(self._pool(worker) for worker in workers))
        started = time.process_time()
        pools = {pool.worker_id: pool for pool in answers if pool is not None}
        drawn = await asyncio.to_thread(snapshot.drawn, self.announcement, info, workers, pools)
        self._drawing_seconds = time.process_time() - started
        return drawn | {"router": self._answered}

    async def _pool(self, worker: cluster_pb2.Worker) -> cluster_pb2.BlockPool | None:
        """Return a worker's pool, or None if the worker does not answer. Then its card shows its state."""
        if worker.state not in snapshot.ANSWERING:
            return None
        try:
            return await self.ask(lambda client: client.block_pool(worker.worker_id))
        except (BlockyardError, CannotReach):
            return None
