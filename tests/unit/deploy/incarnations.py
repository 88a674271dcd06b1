"""A supervisor without Ray: its actors are plain objects, which outlive it as detached actors do."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from inspect import Signature, signature
from typing import Any, NoReturn

from blockyard.deploy.supervision.desired_state import DesiredState, decoded, encoded
from blockyard.deploy.supervision.leadership import SilentHeadError
from blockyard.deploy.supervision.replicas import ClusterSpec, Replica
from blockyard.deploy.supervision.supervisor import Supervisor
from blockyard.router.config import RouterConfig, ServedModel
from blockyard.worker.actor import StartedWorker
from blockyard.worker.config import EngineConfig, WorkerConfig

from simulation.virtual_time import in_virtual_time

SPEC = ClusterSpec(
    namespace="test",
    worker=WorkerConfig(engine=EngineConfig(model="m")),
    num_workers=1,
    num_cpus_per_worker=1.0,
    num_gpus_per_worker=0.0,
    router=RouterConfig(model="m"),
    num_routers=1,
)

NODE, PID = "another-node", 4711
"""Node and process id of a worker that the supervisor itself starts."""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - nothing wakes who waits for a value
            await asyncio.sleep(0.01)


def supervised(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Return a test that runs in virtual time with a supervisor whose worker and router serve, its first argument."""

    async def with_supervisor(arguments: dict[str, Any]) -> None:
        supervisor = FakeIncarnations()
        await asyncio.sleep(10.0)
        try:
            await test(supervisor, **arguments)
        finally:
            await supervisor.leave()

    def run(**arguments: Any) -> None:
        in_virtual_time(lambda: with_supervisor(arguments))()

    _, *others = signature(test).parameters.values()
    run.__signature__ = Signature(others)  # type: ignore[attr-defined]
    run.__doc__ = test.__doc__
    return run


async def leads() -> None:
    """Confirm that the supervisor leads."""


class Remote:
    """A method of an actor."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


class Actor:
    """An object whose method `_name` is called by `name.remote`, as those of Ray's actors are."""

    def __getattr__(self, name: str) -> Remote:
        if name.startswith("_"):
            raise AttributeError(name)
        return Remote(getattr(self, f"_{name}"))


@dataclass(eq=False)
class Worker(Actor):
    """A worker's actor as far as the supervisor calls it."""

    incarnation: str
    draining: bool = False
    is_frozen: bool = False
    """Whether it is alive but answers nothing."""
    answers_after_seconds: float = 0.0
    downloads_for_seconds: float = 0.0
    loads_for_seconds: float = 0.0
    changed: str = ""
    """Files that have changed since it read them, in words."""
    stopped_with: list[float] = field(default_factory=list)
    may_stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Until it is set, a drain goes on."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_stop.set()

    async def _whereabouts(self) -> tuple[str, int]:
        return NODE, PID

    async def _fetch_model(self) -> None:
        await asyncio.sleep(self.downloads_for_seconds)

    async def _start(self) -> StartedWorker:
        await asyncio.sleep(self.loads_for_seconds)
        return StartedWorker(
            address="worker:1", pid=PID, incarnation=self.incarnation, node_id=NODE, code="", dtype=""
        )

    async def _changed_files(self) -> str:
        return self.changed

    async def _until_stopped(self) -> None:
        await self.ended.wait()
        raise RuntimeError("it ended")

    async def _is_draining(self) -> bool:
        while self.is_frozen:  # noqa: ASYNC110 - nothing wakes who waits for a value
            await asyncio.sleep(1.0)
        await asyncio.sleep(self.answers_after_seconds)
        return self.draining

    async def _stop(self, grace_seconds: float, check_leader: Callable[[], None]) -> None:
        check_leader()
        self.stopped_with.append(grace_seconds)
        await self.may_stop.wait()


@dataclass(eq=False)
class Router(Actor):
    """A router's actor: it records the workers' addresses, and sends requests to the incarnations of `ready`."""

    ready: Callable[[], tuple[str, ...]]
    sent_addresses: list[list[str]] = field(default_factory=list)
    sent_at: list[float] = field(default_factory=list)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    """Until it is set, it answers nothing that it is sent."""
    sent_models: list[tuple[str, ...]] = field(default_factory=list)
    is_frozen: bool = False
    num_kills: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    """Models that it cannot serve, and why."""
    refused_lives: dict[str, str] = field(default_factory=dict)
    """Incarnations of workers that it refuses, and why. It has no session with them."""
    num_refusals_told: int = 0
    """Number of answers in which it named such models."""
    adapters: frozenset[str] = frozenset()
    """Names of adapters that it knows."""

    def __post_init__(self) -> None:
        self.may_answer.set()

    async def _set_workers(
        self, addresses: dict[str, list[str]], models: Sequence[ServedModel], epoch: int
    ) -> int:
        self.sent_addresses.append([address for each in addresses.values() for address in each])
        self.sent_models.append(tuple(model.id for model in models))
        self.sent_at.append(asyncio.get_running_loop().time())
        num_ready = len(self.sent_addresses[-1]) - len(self.refused_lives)
        await self.may_answer.wait()
        return num_ready

    async def _refused_workers(self) -> dict[str, str]:
        return self.refused_lives

    async def _set_models(
        self, models: Sequence[ServedModel], grace_seconds: float, check_leader: Callable[[], None]
    ) -> None:
        check_leader()
        self.sent_models.append(tuple(model.id for model in models))

    async def _refused_models(self) -> dict[str, str]:
        self.num_refusals_told += bool(self.refused)
        return self.refused

    async def _adapter_names(self) -> frozenset[str]:
        return self.adapters

    async def _ready_incarnations(self) -> tuple[str, ...]:
        if self.is_frozen:
            await asyncio.Event().wait()
        return self.ready()


@dataclass
class Outlives:
    """State that survives a supervisor: actors by name, the desired state, and the epochs at Ray's head."""

    workers: dict[str, Worker] = field(default_factory=dict)
    epochs: list[int] = field(default_factory=list)
    is_head_silent: bool = False
    """Whether Ray's head is out of the supervisor's reach."""
    desired: bytes | None = None

    def load(self) -> DesiredState | None:
        return None if self.desired is None else decoded(self.desired)

    async def save(self, desired: DesiredState) -> None:
        self.desired = encoded(desired)

    async def forget(self) -> None:
        self.desired = None

    def numbers(self) -> list[int]:
        if self.is_head_silent:
            raise SilentHeadError
        return list(self.epochs)

    def add(self, number: int) -> bool:
        is_new = number not in self.numbers()
        if is_new:
            self.epochs.append(number)
        return is_new

    def remove(self, number: int) -> None:
        self.epochs = [epoch for epoch in self.epochs if epoch != number]


class FakeIncarnations(Supervisor):
    """A supervisor whose worker has one incarnation after the other, and whose router has one that knows them all."""

    def __init__(self, left: Outlives | None = None) -> None:
        self.left = left or Outlives()
        self.ended_processes: list[int] = []
        self.answers_others = False
        """Whether a silent process answers on its own node."""
        self.has_given_way = False
        self.incarnations: list[Worker] = []
        self.fails_to_start = False
        self.never_starts = False
        self.loads_for_seconds = 0.0
        self.is_without_room = False
        """Whether a new incarnation answers nothing from its start."""
        self.known: tuple[str, ...] | None = None
        """Incarnations to which the router says it gives requests; None: all that are alive."""
        self.router = Router(self._ready)
        self.router_ended = asyncio.Event()
        super().__init__(SPEC, self.left, self.left)

    def _living(self) -> frozenset[str]:
        return frozenset(name for name, worker in self.left.workers.items() if not worker.ended.is_set())

    def _adopt(self, name: str) -> Worker:
        return self.left.workers[name]

    def _kill(self, actor: Any) -> None:
        if isinstance(actor, Worker):
            actor.ended.set()
        elif isinstance(actor, Router):
            actor.num_kills, actor.is_frozen = actor.num_kills + 1, False

    async def _end_process(self, replica: Replica, actor: Any, *, if_silent: bool) -> bool:
        if if_silent and self.answers_others:
            return False
        self.ended_processes.append(replica.pid)
        return True

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return call(*arguments)

    def _give_way(self) -> NoReturn:
        self.has_given_way = True
        raise asyncio.CancelledError

    async def _announce(self) -> None:
        """Announce nothing, because no page reads it here."""

    async def _store_reports(self) -> None:
        """Store nothing, because no command reads it here."""

    async def leave(self) -> None:
        """End as by its death: actors go on."""
        await self._tasks.aclose()

    async def serve_too(self, model: ServedModel, num_workers: int) -> None:
        """Add a model with the cluster's settings."""
        await self.add_model(await self.plan_model(model, num_workers))

    async def _run_once(self, replica: Replica) -> None:
        def end(actor: Any) -> Callable[[], Awaitable[bool]]:
            return lambda: self._end_silent(replica, actor)

        if replica.kind == "router":
            self._actors[replica.name] = self.router
            async with self._health.of(replica, self.router, end(self.router)) as health:
                replica.phase, replica.address = "serving", "router:1"
                health.silence_seconds = self._spec.hung_seconds
                self._changed.set()
                await health.unless_hung(self.router_ended.wait())
                del self._actors[replica.name]
                raise RuntimeError("it ended")
        if self.never_starts:
            await asyncio.Event().wait()
        if self.fails_to_start:
            raise RuntimeError("no such model")
        worker = self._adopt_or_make(replica.name)
        replica.pid = len(self.incarnations)
        async with self._health.of(replica, worker, end(worker)) as health:
            if self.loads_for_seconds:
                await health.unless_hung(asyncio.sleep(self.loads_for_seconds))
            replica.phase, replica.address, replica.incarnation = (
                "serving",
                f"{replica.name}:1",
                worker.incarnation,
            )
            replica.num_starts += 1
            self._changed.set()
            health.silence_seconds = self._spec.hung_seconds
            await health.unless_hung(worker.ended.wait())
        raise RuntimeError("it ended")

    def _adopt_or_make(self, name: str) -> Worker:
        worker = self.left.workers.get(name)
        if worker is None or worker.ended.is_set():
            worker = self.left.workers[name] = Worker(incarnation=f"life-{len(self.incarnations)}")
            worker.is_frozen = self.is_without_room
            self.incarnations.append(worker)
        self._actors[name] = worker
        return worker

    def _ready(self) -> tuple[str, ...]:
        if self.known is not None:
            return self.known
        return tuple(worker.incarnation for worker in self.left.workers.values() if not worker.ended.is_set())

    async def replica(self, name: str) -> Replica:
        """Return the first replica of this name or kind."""
        return next(
            replica for replica in (await self.report()).replicas if name in (replica.name, replica.kind)
        )
