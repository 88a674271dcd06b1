"""One run of a scenario: the cluster is built, requests come, faults strike and end, everything comes to rest.

Owns the order of events, the log in which two runs of one seed must agree, and the true state of the cluster. That
state says which processes live and which paths work. Does not own what must hold (checks.py).
"""

import asyncio
import random
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from blockyard.proto.index.twin import TwinPrefixIndex
from blockyard.router.dispatch.prefix_lookup import PrefixLookupConfig
from blockyard.worker.engine_types import EngineRequest
from blockyard.worker.scheduling.pulls import Pull, PullOrder
from blockyard.worker.sequences.identifiers import BlockName, RequestId
from blockyard.worker.transfer.rules import PullResult

from simulation.calls import Connections
from simulation.index_access import IndexServer, IndexState, answer
from simulation.network import Network, Path
from simulation.router_process import RouterProcess, RouterSetup
from simulation.transfers import TRANSFER_PORT, TransferNetwork
from simulation.virtual_time import START_SECONDS, Process, ProcessState, VirtualLoop
from simulation.worker_process import WorkerProcess

from .model import DigestRunner
from .record import Record
from .scenario import HEALED_SECONDS, MAX_MIGRATIONS, NO_WORKER_SECONDS, Fault, Kind, Request, Scenario

ROUTERS = RouterSetup(
    lookup=PrefixLookupConfig(open_seconds=0.3),
    suspect_seconds=0.6,
    lost_seconds=1.0,
    stall_seconds=2.0,
    no_worker_seconds=NO_WORKER_SECONDS,
    max_migrations=MAX_MIGRATIONS,
    max_requests=1000,
    max_tokens=100_000,
)

RECOVERY_SECONDS = 40.0
"""Time after the last fault within which everything is at rest, or never."""
LOOK_SECONDS = 0.1
SETUP_SECONDS = 0.002
SLOW_LINK = 200.0
"""How many times as long a slow link takes for a block."""
TOLD_SECONDS = 0.05
"""Delay until routers hear from their supervisor of a new address."""
EARLIEST_RESTART_SECONDS = 0.05
NOTICED_SECONDS = 3.0
"""Time for which an ended fault may still cost a request its worker: slow steps end, and routers notice."""


@dataclass(slots=True)
class Seat:
    """Name and address of a worker, across incarnations."""

    name: str
    address: str
    life: int = 0
    worker: WorkerProcess[DigestRunner] | None = None
    lives: list[WorkerProcess[DigestRunner]] = field(default_factory=list)
    is_going: bool = False
    """True between the order to drain and the next incarnation."""

    @property
    def alive(self) -> WorkerProcess[DigestRunner] | None:
        return self.worker if self.worker is not None and self.worker.process.is_alive else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedPull:
    reader: str
    """Incarnation, as `source`, which is "" where none has answered."""
    source: str
    pull: Pull
    result: PullResult
    at: float
    """Time on the loop's clock, as `pull.began`."""


class World:
    """Made and run once, on a loop of its own."""

    def __init__(self, scenario: Scenario, loop: VirtualLoop) -> None:
        self.scenario = scenario
        self.loop = loop
        self.chance = random.Random(f"world {scenario.seed}")
        self.network = Network(loop, self.chance)
        self.connections = Connections(self.network)
        self.connections.on_message = self._heard
        self.index = IndexServer(TwinPrefixIndex(loop.time), self.network)
        self.transfers = TransferNetwork(
            bytes_per_second=scenario.pulled_blocks_per_second * scenario.setup.bytes_per_block,
            setup_seconds=SETUP_SECONDS,
            on_end=self._pull_ended,
        )
        self.pulls: list[EndedPull] = []
        self.setup = scenario.setup
        if scenario.pulled_blocks_per_second:
            self.setup = replace(scenario.setup, transfers=self.transfers)
        self.seats = [Seat(f"w{number}", f"w{number}:1") for number in range(scenario.num_workers)]
        self.routers: list[RouterProcess] = []
        self.dead_routers: list[RouterProcess] = []
        self.records: list[Record] = []
        self.log: list[tuple[object, ...]] = []
        self.is_over = self.is_at_rest = False
        self._last_frame = b""
        self.struck: Counter[Kind] = Counter()
        self.blows: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """Time spans in which something could cost a request its worker, by the router's name; "" is all routers."""
        self.disturbances: dict[tuple[str, str], list[tuple[float, bool]]] = defaultdict(list)
        """Changes of availability, by router and seat: when the router could begin or stop using the worker."""
        self.doubled: dict[str, float] = {}
        """Requests that run on more than one worker, and since when."""
        self.on_look: Callable[[World], None] = lambda world: None

    @property
    def now(self) -> float:
        """Seconds since the start of the run."""
        return self.loop.time() - START_SECONDS

    def note(self, *what: object) -> None:
        if not self.is_over:
            self.log.append((round(self.now, 6), *what))

    def workers(self) -> list[WorkerProcess[DigestRunner]]:
        return [worker for seat in self.seats if (worker := seat.alive) is not None]

    async def run(self) -> None:
        self._build()
        for request in self.scenario.requests:
            self._at(request.at, partial(self._arrive, request))
        for fault in self.scenario.faults:
            self._at(fault.at, partial(self._strike, fault))
        self._at(HEALED_SECONDS, self._heal_all)
        while self.now < HEALED_SECONDS or not self._is_at_rest():
            self.on_look(self)
            if self.now > HEALED_SECONDS + RECOVERY_SECONDS:
                self.note("never at rest")
                return
            await asyncio.sleep(LOOK_SECONDS)
        self.is_at_rest = True
        self.note("at rest")

    # What is there

    def _build(self) -> None:
        for seat in self.seats:
            self._seat(seat)
        for number in range(self.scenario.num_routers):
            self._start_router(number)

    def _seat(self, seat: Seat) -> None:
        seat.life += 1
        seat.is_going = False
        seat.worker = WorkerProcess(
            seat.name,
            seat.life,
            seat.address,
            self.setup,
            self.loop,
            self.connections,
            self.index,
            random.Random(f"{seat.name}#{seat.life} {self.scenario.seed}"),
            role=self.scenario.roles[self.seats.index(seat)] if self.scenario.roles else "both",
        )
        seat.lives.append(seat.worker)
        if self.setup.transfers is not None:
            submit = partial(self._submit, seat, seat.worker.engine.submit)
            setattr(seat.worker.engine, "submit", submit)  # noqa: B010 - a method of one object
        seat.worker.start()
        self.note("life", seat.worker.incarnation, seat.address)
        self._changed()

    def _submit(
        self, seat: Seat, submit: Callable[[EngineRequest], RequestId], request: EngineRequest
    ) -> RequestId:
        """Submit a request, half of them with an order to pull that a router may give, whether that pays or not.

        The router may take the source for an earlier incarnation, or believe it to have what it lacks.
        """
        if request.pull is None and self.chance.random() < 0.9:
            source, depth = self._source_for(seat, request.names[1:])
            lives = [life.incarnation for life in source.lives]
            order = PullOrder(
                address=f"{source.name}:{TRANSFER_PORT}",
                incarnation=self.chance.choice((f"{source.name}#0", *lives, *lives[-1:] * 12)),
                num_blocks=max(depth + self.chance.choice((-1, 0, 0, 0, 3)), 1),
                seconds=self.chance.choice((0.02, 0.3, 2.0)),
            )
            request = replace(request, pull=order)
        return submit(request)

    def _pull_ended(self, reader: str, source: str, pull: Pull, result: PullResult) -> None:
        ended = EndedPull(reader=reader, source=source, pull=pull, result=result, at=self.loop.time())
        self.pulls.append(ended)
        self.note("pulled", reader, source, result.end, result.num_blocks)

    def _source_for(self, seat: Seat, names: list[BlockName]) -> tuple[Seat, int]:
        """Return another worker, most often the one with the most leading blocks, and how many it has."""
        others = [(_depth(other, names), other.name, other) for other in self.seats if other is not seat]
        depth, _, source = max(others) if self.chance.random() < 0.7 else self.chance.choice(others)
        return source, depth

    def _start_router(self, number: int, life: int = 1) -> None:
        name = f"r{number}#{life}"
        router = RouterProcess(
            name,
            replace(ROUTERS, policy=self.scenario.policy),
            self.loop,
            self.connections,
            self.index,
            self.chance.randrange(2**30),
        )
        self.routers[number : number + 1] = [router]
        for seat in self.seats:
            self._set_up(self.network.path(name, seat.address))
        router.start([seat.address for seat in self.seats])
        self.note("router", name)
        self._changed()

    def _set_up(self, path: Path) -> None:
        path.latency_seconds = self.scenario.latency_seconds
        path.jitter_seconds = self.scenario.jitter_seconds

    # What comes

    def _at(self, seconds: float, action: Callable[[], object]) -> None:
        self.network.later(seconds - self.now, action)

    def _arrive(self, request: Request) -> None:
        router = self.routers[request.router]
        record = Record(request, router.name, self.now, self._ended)
        self.records.append(record)
        self.note("arrives", request.number, router.name)
        if not router.process.is_alive:
            record.end("ROUTER_DIED", self.now)
            return
        task = router.accept(request.call(), record)
        if request.cancel_after is not None:
            self._at(self.now + request.cancel_after, task.cancel)

    def _ended(self, record: Record) -> None:
        self.note("ends", record.request.number, record.outcome, [len(output) for output in record.outputs])

    def _heard(self, host: str, address: str, way: str, data: bytes) -> None:
        self.note(way, host, address, len(data), zlib.crc32(data))

    # Faults

    def _strike(self, fault: Fault) -> None:
        """Strike with a fault. A fault whose target already has another one does not happen."""
        seat, router = self.seats[fault.worker], self.routers[fault.router]
        path = self.network.path(router.name, seat.address)
        worker = seat.alive
        until = min(self.now + fault.seconds, HEALED_SECONDS)
        self.note("fault", fault.kind.name, seat.name, router.name, round(fault.seconds, 3))
        self.struck[fault.kind] += 1
        match fault.kind:
            case Kind.KILL | Kind.MOVE if worker is not None:
                self._kill(seat, worker)
                self._at(max(until, self.now + EARLIEST_RESTART_SECONDS), lambda: self._restart(seat, fault))
            case Kind.HANG if worker is not None and worker.process.state is ProcessState.RUNNING:
                worker.process.freeze()
                self._blow(until)
                self._at(until, lambda: self._thaw(worker))
            case Kind.SLOW if worker is not None:
                worker.runner.slowness = 100.0
                self._blow(until)
                self._at(until, lambda: setattr(worker.runner, "slowness", 1.0))
            case Kind.DRAIN if worker is not None and not seat.is_going:
                seat.is_going = True
                worker.process.start(self._replace(seat, worker, fault.seconds))
            case Kind.PAUSE if worker is not None and not seat.is_going:
                seat.is_going = True
                worker.drain(fault.seconds / 2)
                self._at(until, lambda: self._resume(seat, worker))
            case Kind.FLUSH if worker is not None:
                worker.flush()
            case Kind.REBUILD if worker is not None:
                worker.rebuild()
            case Kind.CUT | Kind.CUT_UP | Kind.CUT_DOWN:
                self.network.cut(path, up=fault.kind is not Kind.CUT_DOWN, down=fault.kind is not Kind.CUT_UP)
                self._blow(until, router.name)
                self._at(until, lambda: self._heal(path, router.name))
            case Kind.RESET:
                self.connections.reset(router.name, seat.address)
                self._blow(router=router.name)
            case Kind.LAG:
                path.latency_seconds += 0.3
                self._blow(until, router.name)
                self._at(until, lambda: self._end_lag(path))
            case Kind.INDEX_DOWN:
                self.index.set_state(IndexState.DOWN)
                self._at(until, lambda: self.index.set_state(IndexState.UP))
            case Kind.INDEX_HUNG:
                self.index.set_state(IndexState.HUNG)
                self._at(until, lambda: self.index.set_state(IndexState.UP))
            case Kind.INDEX_FLUSHED:
                self.index.twin.flush()
            case Kind.INDEX_SLOW:
                self.index.jitter_seconds = 0.3
                self._at(until, lambda: setattr(self.index, "jitter_seconds", 0.0))
            case Kind.INDEX_LOSES_REPLIES:
                self.index.lost_replies = 0.5
                self._at(until, lambda: setattr(self.index, "lost_replies", 0.0))
            case Kind.KILL_ROUTER:
                self._kill_router(fault.router, until)
            case Kind.PULL_CUT:
                self._spoil(seat, until, is_cut=True)
            case Kind.PULL_STUCK:
                self._spoil(seat, until, is_stuck=True)
            case Kind.PULL_SLOW:
                self._spoil(seat, until, slowness=SLOW_LINK)
            case Kind.PULL_HARM:
                self._spoil(seat, until, harm=self._harmed)
            case Kind.PULL_RESET:
                self.transfers.reset(seat.name)
            case _:
                self.struck[fault.kind] -= 1
        self._changed()

    def _spoil(self, seat: Seat, until: float, **changes: Any) -> None:
        card = self.transfers.card(seat.name)
        for name, value in changes.items():
            setattr(card, name, value)
        self._at(until, lambda: self._mend(seat))

    def _mend(self, seat: Seat) -> None:
        card = self.transfers.card(seat.name)
        card.is_cut, card.slowness, card.is_stuck, card.harm = False, 1.0, False, None

    def _harmed(self, frame: bytes) -> bytes:
        """Return what becomes of a frame of a transfer. Each harm strikes some blocks alone."""
        at, before = self.chance.randrange(len(frame)), self._last_frame or frame
        self._last_frame = frame
        match self.chance.choice(("", "flipped", "flipped", "short", "long", "doubled", "late")):
            case "flipped":
                return frame[:at] + bytes([frame[at] ^ 1 << self.chance.randrange(8)]) + frame[at + 1 :]
            case "short":
                return frame[:at]
            case "long":
                return frame[:at] + frame[at : at + 1] + frame[at:]
            case "doubled":
                return frame + frame
            case "late":
                return before
        return frame

    def _kill(self, seat: Seat, worker: WorkerProcess[DigestRunner]) -> None:
        worker.process.kill()
        self.connections.died(worker.process)
        self.transfers.died(worker.process)
        seat.is_going = True
        self._blow()

    def _restart(self, seat: Seat, fault: Fault) -> None:
        if fault.kind is Kind.MOVE:
            seat.address = f"{seat.name}:{seat.life + 1}"
            for router in self.routers:
                self._set_up(self.network.path(router.name, seat.address))
            self._at(self.now + TOLD_SECONDS, self._tell_addresses)
        self._seat(seat)

    def _tell_addresses(self) -> None:
        for router in self.routers:
            if router.process.is_alive:
                router.fleet.set_addresses([seat.address for seat in self.seats])

    async def _replace(self, seat: Seat, worker: WorkerProcess[DigestRunner], grace_seconds: float) -> None:
        """Restart a worker as a supervisor does: drain, stop, start."""
        await worker.drain(grace_seconds)
        self.note("drained", worker.incarnation)
        self._blow()
        await worker.leave()
        self.network.later(0.1, lambda: self._next_life(seat, worker))

    def _next_life(self, seat: Seat, worker: WorkerProcess[DigestRunner]) -> None:
        if worker.process.is_alive:
            worker.process.kill()
            self.connections.died(worker.process)
            self.transfers.died(worker.process)
            self._seat(seat)

    def _resume(self, seat: Seat, worker: WorkerProcess[DigestRunner]) -> None:
        if seat.worker is worker and worker.process.is_alive:
            worker.resume()
            seat.is_going = False
            self._changed()

    def _thaw(self, worker: WorkerProcess[DigestRunner]) -> None:
        worker.process.thaw()
        self.note("thaws", worker.incarnation)
        self._changed()

    def _end_lag(self, path: Path) -> None:
        self._set_up(path)
        self._changed()

    def _heal(self, path: Path, host: str) -> None:
        self.network.heal(path)
        self.note("heals", host)
        self._changed()

    def _kill_router(self, number: int, until: float) -> None:
        router = self.routers[number]
        if not router.process.is_alive:
            return
        router.process.kill()
        self.connections.died(router.process)
        self.dead_routers.append(router)
        for record in self.records:
            if record.router == router.name and not record.outcome:
                record.end("ROUTER_DIED", self.now)
        life = int(router.name.partition("#")[2]) + 1
        self._at(max(until, self.now + EARLIEST_RESTART_SECONDS), lambda: self._start_router(number, life))

    def _heal_all(self) -> None:
        for path in self.network.paths():
            self._set_up(path)
            self.network.heal(path)
        self.index.jitter_seconds = self.index.lost_replies = 0.0
        for seat in self.seats:
            self._mend(seat)
        if self.index.state is not IndexState.UP:
            self.index.set_state(IndexState.UP)
        for worker in self.workers():
            worker.process.thaw()
            worker.runner.slowness = 1.0
        self.note("healed")
        self._changed()

    # What is true

    def _blow(self, until: float = 0.0, router: str = "") -> None:
        self.blows[router].append((self.now, max(until, self.now) + NOTICED_SECONDS))

    def _changed(self) -> None:
        """Record which workers are available from now on."""
        for router in self.routers:
            for seat in self.seats:
                worker = seat.alive
                path = self.network.path(router.name, seat.address)
                can = (
                    worker is not None
                    and worker.process.state is ProcessState.RUNNING
                    and not seat.is_going
                    and worker.runner.slowness == 1.0
                    and path.is_whole
                    and path.latency_seconds == self.scenario.latency_seconds
                )
                history = self.disturbances[router.name, seat.name]
                if not history or history[-1][1] is not can:
                    history.append((self.now, can))

    def was_available(self, router: str, since: float, until: float) -> bool:
        """Return whether any one worker was available all along."""
        return any(self.was_seat_available(router, seat.name, since, until) for seat in self.seats)

    def was_seat_available(self, router: str, seat: str, since: float, until: float) -> bool:
        state = False
        for at, can in self.disturbances[router, seat]:
            if at > until:
                break
            if at > since and not can:
                return False
            if at <= since:
                state = can
            elif not state:
                return False
        return state

    def num_blows(self, router: str, since: float, until: float) -> int:
        return sum(begin <= until and end >= since for begin, end in (*self.blows[""], *self.blows[router]))

    def _is_at_rest(self) -> bool:
        """Return whether every request has ended, and every process knows everything."""
        return (
            all(record.outcome for record in self.records)
            and len(self.workers()) == len(self.seats)
            and all(worker.is_serving and worker.is_idle() and _is_told(worker) for worker in self.workers())
            and not any(len(worker.engine.scheduler.pulls) for worker in self.workers())
            and all(router.process.is_alive and self._knows_all(router) for router in self.routers)
            and self._is_index_of_the_living
        )

    def _knows_all(self, router: RouterProcess) -> bool:
        lives = {seat.worker.incarnation for seat in self.seats if seat.worker is not None}
        return {worker.incarnation for worker in router.fleet.view.ready()} == lives and not any(
            len(worker.booked) for worker in router.fleet.view.workers()
        )

    @property
    def _is_index_of_the_living(self) -> bool:
        """True if all live workers are in the index, and entries of dead ones are removed."""
        twin = self.index.twin
        standing = {str(record.incarnation) for record in answer(twin.directory())}
        lives = {worker.incarnation for worker in self.workers()}
        return standing == lives and len(twin._berths) == len(twin._live())


def _is_told(worker: WorkerProcess[DigestRunner]) -> bool:
    state = worker.publisher.state()
    return state.berth is not None and not state.num_pending and state.last_error is None


def _depth(seat: Seat, names: list[BlockName]) -> int:
    if seat.alive is None:
        return 0
    scheduler = seat.alive.engine.scheduler
    on_gpu = len(scheduler.cache.match(names))
    assert scheduler.host_cache is not None
    return on_gpu + len(scheduler.host_cache.match(names[on_gpu:]))


def run_processes(world: World) -> list[Process]:
    """Return all processes that ever existed."""
    routers = [*world.routers, *world.dead_routers]
    lives = [worker for seat in world.seats for worker in seat.lives]
    return [router.process for router in routers] + [worker.process for worker in lives]
