"""Joins routers and workers: tells routers where workers are, and checks that they are connected.

Owns how often routers are told and what counts as in use. Shares replicas and actors with the supervisor, which owns
them. Changes nothing of them except how many workers a router reports as ready.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from blockyard.deploy.supervision.actors import CALL_SECONDS, START_SECONDS, all_of, answer
from blockyard.deploy.supervision.leadership import Leadership
from blockyard.deploy.supervision.replicas import PUSH_SECONDS, Replica, push_pause_seconds
from blockyard.router.config import ServedModel
from ray.exceptions import RayActorError, RayTaskError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
"""Pause between two checks while a caller waits for a restart."""
REFUSED_SECONDS = 10.0
"""Time for which a router must have refused a model before a caller gets an error. Between its first two attempts it
pauses for 4 s."""
REFUSED_WORKER_SECONDS = 20.0
"""Time for which a router must have refused a worker before a caller gets an error. A router that reads changed files
takes a few seconds."""
MAX_FAILED_STARTS = 3
"""Failed starts in a row of a new or restarted replica before its caller gets an error. The supervisor keeps trying."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """The routers and workers of one cluster."""

    replicas: list[Replica]
    actors: dict[str, Any]
    changed: asyncio.Event
    """Set when a replica has changed in a way that matters to routers."""
    models: Callable[[], Sequence[ServedModel]]
    """Returns the models that routers should serve, the default one first."""
    lead: Leadership

    async def wait_until_in_use(self, replica: Replica, num_starts: int) -> None:
        """Wait until a replica, which had started `num_starts` times, has started again and is in use.

        Raise RuntimeError if it does not start, leaves the cluster, takes longer than START_SECONDS, or if a router
        cannot serve its model for REFUSED_SECONDS.
        """
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._until_in_use(replica, num_starts)
        except TimeoutError:
            raise RuntimeError(f"{replica.name} was not in use within {START_SECONDS:.0f} s") from None

    async def wait_until_all_in_use(self, new: Iterable[Replica]) -> None:
        """Wait until each new replica is in use after its first start. Raise the first failure, a RuntimeError."""
        try:
            async with asyncio.TaskGroup() as waits:
                for replica in new:
                    waits.create_task(self.wait_until_in_use(replica, 0))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def wait_until_serving(self, new: Iterable[Replica]) -> None:
        """Wait until each new replica serves, whether a router knows it or not. Raise as `wait_until_in_use` does."""

        async def serves(replica: Replica) -> bool:
            return replica.phase == "serving"

        try:
            async with asyncio.timeout(START_SECONDS):
                for replica in new:
                    await self._until_in_use(replica, 0, serves)
        except TimeoutError:
            raise RuntimeError(f"not all workers served within {START_SECONDS:.0f} s") from None

    async def _until_in_use(
        self, replica: Replica, num_starts: int, is_done: Callable[[Replica], Awaitable[bool]] | None = None
    ) -> None:
        refused_since = math.inf
        is_done = is_done or self.is_in_use
        while replica.num_starts == num_starts or not await is_done(replica):
            if replica.num_starts == num_starts and replica.num_failures_in_a_row >= MAX_FAILED_STARTS:
                again = " again" if num_starts else ""
                raise RuntimeError(f"{replica.name} does not start{again}: {replica.error}")
            if replica not in self.replicas:
                raise RuntimeError(f"{replica.name} was removed meanwhile, by `scale` or `model remove`")
            refusal = await self._refusal(replica) if replica.phase == "serving" else ""
            now = asyncio.get_running_loop().time()
            refused_since = min(refused_since, now) if refusal else math.inf
            if now - refused_since >= (REFUSED_WORKER_SECONDS if replica.refusal else REFUSED_SECONDS):
                raise RuntimeError(refusal)
            await asyncio.sleep(LOOK_SECONDS)

    async def _refusal(self, worker: Replica) -> str:
        """Return why a router cannot serve this worker or its model. Empty if all can, as far as they answer."""
        if worker.refusal:
            return f"{worker.name} runs, but {worker.refusal}"
        for router, refused in await self._ask_routers(lambda actor: actor.refused_models.remote()):
            if worker.model in refused:
                return f"{router} cannot serve {worker.model}, and tries again: {refused[worker.model]}"
        return ""

    async def adapter_names(self) -> frozenset[str]:
        """Return the names of all adapters that routers know, as far as they answer."""
        answers = await self._ask_routers(lambda actor: actor.adapter_names.remote())
        return frozenset(name for _, names in answers for name in names)

    async def _ask_routers(self, ask: Callable[[Any], Awaitable[Any]]) -> list[tuple[str, Any]]:
        """Return the answers of the routers that serve, with their names. Those that do not answer are left out."""
        routers = [each for each in self.replicas if self._is_router(each) and each.phase == "serving"]
        asked = [answer(ask(self.actors[router.name]), CALL_SECONDS) for router in routers]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [
            (router.name, found)
            for router, found in zip(routers, answers, strict=True)
            if not isinstance(found, BaseException)
        ]

    async def is_in_use(self, replica: Replica) -> bool:
        """Tell whether all routers use this worker, or whether this router uses all serving workers."""
        if replica.phase != "serving":
            return False
        serving = [other for other in self.replicas if other.phase == "serving"]
        routers = [other for other in serving if other.kind == "router"]
        workers = [other for other in serving if other.kind == "worker"]
        needed = (
            {replica.incarnation} if replica.kind == "worker" else {worker.incarnation for worker in workers}
        )
        asked = routers if replica.kind == "worker" else [replica]
        try:
            ready = [
                await answer(self.actors[router.name].ready_incarnations.remote(), CALL_SECONDS)
                for router in asked
            ]
        except (RayActorError, RayTaskError, TimeoutError, KeyError):
            return False  # A router has ended or is silent. The supervisor's loop for it handles that.
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
            workers = [replica for replica in self.replicas if replica.kind == "worker" and replica.is_up]
            routers = [
                replica
                for replica in self.replicas
                if replica.kind == "router" and replica.phase == "serving"
            ]
            # A draining worker is included, because its streams go on.
            addresses: dict[str, list[str]] = {}
            for replica in workers:
                if replica.address:
                    addresses.setdefault(replica.model, []).append(replica.address)
            num_serving = sum(replica.phase == "serving" for replica in workers)
            before = [replica.num_ready_workers for replica in routers]
            if self.lead.is_recent:
                await all_of(*(self._inform(replica, addresses) for replica in routers))
            after = [replica.num_ready_workers for replica in routers]
            are_joined = all(num_ready >= num_serving for num_ready in after)
            await all_of(self._note_refusals(workers, are_joined=are_joined))
            pause_seconds = push_pause_seconds(
                pause_seconds,
                are_joined=are_joined,
                has_news=has_news or after != before,
            )

    async def _note_refusals(self, workers: Iterable[Replica], *, are_joined: bool) -> None:
        """Note in each worker why a router refuses it. With `are_joined` none does."""
        refusals: dict[str, str] = {}
        if not are_joined:
            for router, refused in await self._ask_routers(lambda actor: actor.refused_workers.remote()):
                refusals |= {worker: f"{router} refuses it: {reason}" for worker, reason in refused.items()}
        for worker in workers:
            if (refusal := refusals.get(worker.incarnation, "")) != worker.refusal:
                worker.refusal = refusal
                if refusal:
                    logger.error("%s: %s", worker.name, refusal)

    async def stop_serving(self, models: Sequence[ServedModel], grace_seconds: float) -> None:
        """Have all routers serve these models and no others. Return once calls for others have ended."""
        actors = [self.actors[replica.name] for replica in self.replicas if self._is_router(replica)]
        seconds = grace_seconds + CALL_SECONDS
        check = self.lead.claim.check
        await all_of(
            *(answer(actor.set_models.remote(models, grace_seconds, check), seconds) for actor in actors)
        )

    def _is_router(self, replica: Replica) -> bool:
        return replica.kind == "router" and replica.name in self.actors

    async def _inform(self, router: Replica, addresses: dict[str, list[str]]) -> None:
        actor = self.actors[router.name]
        told = actor.set_workers.remote(addresses, self.models(), self.lead.claim.number)
        num_ready_workers = await answer(told, PUSH_SECONDS)
        # The router may have been restarted meanwhile. Then the number says nothing about the new process.
        if self.actors.get(router.name) is actor:
            router.num_ready_workers = num_ready_workers
