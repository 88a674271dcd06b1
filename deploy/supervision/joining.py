"""Joins routers and workers: tells routers where workers are, and checks that they are connected.

Owns how often routers are told and what counts as in use. Shares replicas and actors with the supervisor, which owns
them. Changes nothing of them except how many workers a router reports as ready.
"""

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from blockyard.deploy.supervision.actors import CALL_SECONDS, START_SECONDS, all_of, answer
from blockyard.deploy.supervision.replicas import PUSH_SECONDS, Place, push_pause_seconds
from ray.exceptions import RayActorError, RayTaskError

LOOK_SECONDS = 0.05
"""Pause between two checks while a caller waits for a restart."""
MAX_FAILED_STARTS = 3
"""Failed starts of a new or restarted replica before its caller gets an error. The supervisor keeps trying."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """The routers and workers of one cluster."""

    places: list[Place]
    actors: dict[str, Any]
    changed: asyncio.Event
    """Set when a replica has changed in a way that matters to routers."""

    async def wait_until_in_use(self, place: Place, num_starts: int) -> None:
        """Wait until a replica is in use after more than `num_starts` starts. Raise RuntimeError if that fails."""
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._until_in_use(place, num_starts)
        except TimeoutError:
            raise RuntimeError(f"{place.name} was not in use within {START_SECONDS:.0f} s") from None

    async def wait_until_all_in_use(self, new: Iterable[Place]) -> None:
        """Wait until each is in use after its first start. Raise the first failure."""
        try:
            async with asyncio.TaskGroup() as waits:
                for place in new:
                    waits.create_task(self.wait_until_in_use(place, 0))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _until_in_use(self, place: Place, num_starts: int) -> None:
        while place.num_starts == num_starts or not await self.is_in_use(place):
            if place.num_starts == num_starts and place.num_failures_in_a_row >= MAX_FAILED_STARTS:
                again = " again" if num_starts else ""
                raise RuntimeError(f"{place.name} does not start{again}: {place.error}")
            if place not in self.places:
                raise RuntimeError(f"{place.name} was taken out meanwhile: the cluster shrinks")
            await asyncio.sleep(LOOK_SECONDS)

    async def is_in_use(self, place: Place) -> bool:
        """Tell whether all routers use this worker, or whether this router uses all serving workers."""
        if place.phase != "serving":
            return False
        serving = [other for other in self.places if other.phase == "serving"]
        routers = [other for other in serving if other.kind == "router"]
        workers = [other for other in serving if other.kind == "worker"]
        needed = {place.incarnation} if place.kind == "worker" else {worker.incarnation for worker in workers}
        asked = routers if place.kind == "worker" else [place]
        try:
            ready = [
                await answer(self.actors[router.name].ready_incarnations.remote(), CALL_SECONDS)
                for router in asked
            ]
        except (RayActorError, RayTaskError, TimeoutError, KeyError):
            return False  # It has ended meanwhile. Its own loop handles that.
        return all(needed <= set(incarnations) for incarnations in ready)

    async def keep_routers_informed(self) -> None:
        """Tell routers the workers' addresses after each change and at intervals, until cancelled."""
        pause_seconds = PUSH_SECONDS
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_seconds):
                    await self.changed.wait()
            has_news = self.changed.is_set()
            self.changed.clear()
            workers = [place for place in self.places if place.kind == "worker" and place.is_up]
            routers = [place for place in self.places if place.kind == "router" and place.phase == "serving"]
            # A draining worker is included, because its streams go on.
            addresses = [place.address for place in workers if place.address]
            num_serving = sum(place.phase == "serving" for place in workers)
            before = [place.num_ready_workers for place in routers]
            await all_of(*(self._inform(place, addresses) for place in routers))
            after = [place.num_ready_workers for place in routers]
            pause_seconds = push_pause_seconds(
                pause_seconds,
                are_joined=all(num_ready >= num_serving for num_ready in after),
                has_news=has_news or after != before,
            )

    async def _inform(self, router: Place, addresses: list[str]) -> None:
        actor = self.actors[router.name]
        num_ready_workers = await answer(actor.set_workers.remote(addresses), PUSH_SECONDS)
        # The router may have been replaced meanwhile. Then the number says nothing about its successor.
        if self.actors.get(router.name) is actor:
            router.num_ready_workers = num_ready_workers
