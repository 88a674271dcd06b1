"""Invariants of a run: while it goes on, when it is at rest, and when everything has ended.

The names are those of the project's list of faults:

- I1: blocks are conserved.
- I2: tokens come exactly once.
- I3: every request ends once, for a reason that exists.
- I5: errors of the index cost only cache hits.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from math import inf

from blockyard.proto.naming.block_hash import chain
from blockyard.proto.v1.session_pb2 import PullEnd
from blockyard.worker.scheduling.pulls import LATE_SECONDS as PULL_LATE_SECONDS

from simulation.index_access import answer
from simulation.router_process import RouterProcess
from simulation.virtual_time import ProcessState
from simulation.worker_process import SECRET, WorkerProcess

from .model import DigestRunner, expected_outputs
from .record import Record
from .scenario import MAX_MIGRATIONS, NO_WORKER_SECONDS
from .world import World, run_processes

BACK_SECONDS = 9.0
"""Bound after which an available worker is ready in every router. 5 s until a missing greeting times out, 2 s until the
next try, and the rest for slow steps."""
LONGEST_PAUSE_SECONDS = 6.0
"""Silence, once for each worker that a request may lose, and its share of a slow worker that others wait for too."""
DROPPED_SECONDS = 0.7
"""Twice the longest step, and the delay behind what was sent while the path was slow."""
LATE_SECONDS = 1.0
"""Maximum time between a deadline and the end that it causes."""


class Violation(AssertionError):
    """An invariant does not hold."""


def check_now(world: World) -> None:
    """Check I1 and more. It is cheap enough for every moment."""
    for worker in world.workers():
        worker.engine.scheduler.check_invariants()
        _require(not worker.runner.defects, f"{worker.incarnation}: {worker.runner.defects}")
        _check_waits(worker)
    _check_pulls(world)
    for router in world.routers:
        if router.process.is_alive:
            router.fleet.view.check_invariants()
    for process in run_processes(world):
        _require(not process.failures, f"{process} has failed: {process.failures}")
    _check_running(world)
    for record in world.records:
        _require(not record.defects, f"I2: request {record.request.number}: {record.defects}")
        late = world.now - record.arrived - record.request.deadline_seconds
        _require(
            bool(record.outcome) or late < LATE_SECONDS,
            f"I3: request {record.request.number} lives {late:.1f} s longer than its deadline",
        )


def _check_waits(worker: WorkerProcess[DigestRunner]) -> None:
    """Check that nobody waits for a pull for longer than its estimate, on a worker that is neither slow nor frozen."""
    is_slow = worker.runner.slowness > 1.0 or worker.process.state is not ProcessState.RUNNING
    if is_slow or not worker.is_serving or worker.stalled_seconds > DROPPED_SECONDS / 2:
        return
    for pull, waiting in worker.engine.scheduler.pulls._waiting.items():
        late = worker.engine._clock() - pull.deadline - PULL_LATE_SECONDS
        _require(
            not waiting or late < DROPPED_SECONDS,
            f"{worker.incarnation} waits {late:.2f} s too long for a pull from {pull.order.address}",
        )


def _check_pulls(world: World) -> None:
    """Check that only the wanted incarnation has sent blocks, and that a source of harmed ones is left alone."""
    harmed: dict[tuple[str, str], float] = {}
    for ended in world.pulls:
        result, order = ended.result, ended.pull.order
        about = f"{ended.reader}'s pull from {order.incarnation} at {order.address}"
        _require(
            ended.source in ("", order.incarnation) or not result.num_blocks,
            f"{about} brought {result.num_blocks} blocks of {ended.source}",
        )
        key = ended.reader, order.address
        is_early = ended.pull.began > harmed.get(key, inf)
        _require(
            not is_early or result.end in (PullEnd.PULL_END_AVOIDED, PullEnd.PULL_END_CANCELLED),
            f"{about} came {ended.pull.began - harmed.get(key, inf):.1f} s after harmed blocks",
        )
        if result.end == PullEnd.PULL_END_CORRUPT:
            harmed[key] = ended.at


def _check_running(world: World) -> None:
    """Check that each request runs once: a reachable worker drops a request that has ended, or moved elsewhere."""
    records = {record.request.request_id: record for record in world.records}
    places = Counter[str]()
    for seat in world.seats:
        worker = seat.alive
        if worker is None or not worker.is_serving:
            continue
        for request_id in worker.service._routes.client_request_ids().values():
            record, since = records[request_id], world.now - DROPPED_SECONDS
            is_available = world.was_seat_available(record.router, seat.name, since, world.now)
            if not is_available or worker.stalled_seconds > DROPPED_SECONDS / 2:
                continue
            places[request_id] += 1
            _require(
                not record.outcome or record.ended > since,
                f"I1: {request_id} ended at {record.ended:.2f} and runs on {seat.name} still",
            )
    world.doubled = {
        request_id: world.doubled.get(request_id, world.now)
        for request_id, count in places.items()
        if count > 1
    }
    for request_id, since in world.doubled.items():
        _require(world.now - since < DROPPED_SECONDS, f"I1: {request_id} runs twice since {since:.2f}")


def check_at_rest(world: World) -> None:
    """Check I1, I2, I3 and I5 after all faults are healed."""
    check_now(world)
    _require(world.is_at_rest, "; ".join(_unrest(world)))
    for record in world.records:
        _check_outcome(world, record)
        _check_pauses(world, record)
        _check_tokens(world, record)
    for worker in world.workers():
        _check_idle_worker(worker)
    for router in world.routers:
        _check_idle_router(world, router)
    _check_index(world)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise Violation(message)


def _check_outcome(world: World, record: Record) -> None:
    request, since, until = record.request, record.arrived, record.ended
    about = (
        f"I3: request {request.number} of {record.router}, {since:.2f} to {until:.2f}, ended {record.outcome}"
    )
    lasted = until - since
    match record.outcome:
        case "finished":
            missing = set(range(request.n)) - record.finished - request.stop_after.keys()
            _require(not missing, f"{about} without outputs {missing}")
        case "CANCELLED":
            _require(request.cancel_after is not None and lasted >= request.cancel_after - 1e-6, about)
        case "ROUTER_DIED":
            pass
        case "DEADLINE_EXCEEDED" | "DEADLINE_UNREACHABLE":
            # A worker sheds early what cannot meet its deadline any more.
            _require(
                request.deadline_seconds < 60 and lasted <= request.deadline_seconds + LATE_SECONDS, about
            )
        case "NO_WORKERS":
            _require(lasted >= NO_WORKER_SECONDS - 1e-6, about)
            _require(not world.was_available(record.router, until - BACK_SECONDS, until), about)
        case "WORKER_LOST":
            _require(world.num_blows(record.router, since, until) > MAX_MIGRATIONS, about)
        case "POISON_REQUEST":
            _require(world.num_blows(record.router, since, until) >= 2, about)
        case "REQUEST_TOO_LARGE":
            _require(_is_too_large(world, record) or _are_beams_too_large(world, record), about)
        case _:
            raise Violation(about)
    _require(record.outcome != "finished" or not _is_too_large(world, record), f"{about}, too large")


def _check_pauses(world: World, record: Record) -> None:
    """Check that a request moves to another worker if some worker was available all along."""
    for since, until in record.pauses:
        _require(
            until - since < LONGEST_PAUSE_SECONDS or not world.was_available(record.router, since, until),
            f"I3: request {record.request.number} of {record.router} brought nothing, {since:.2f} to {until:.2f}",
        )


def _is_too_large(world: World, record: Record) -> bool:
    longest = world.scenario.setup.scheduler.max_model_len
    return len(record.request.prompt) + record.request.max_tokens > longest


def _are_beams_too_large(world: World, record: Record) -> bool:
    """They may be: how far beams share is the scheduler's estimate."""
    request, setup = record.request, world.scenario.setup
    longest = len(request.prompt) + request.max_tokens
    return request.beam_width * -(-longest // setup.scheduler.block_size) > setup.num_blocks


def _check_tokens(world: World, record: Record) -> None:
    """Check that a request that was cut short has the beginning."""
    if _is_too_large(world, record):
        return
    request, config = record.request, world.scenario.setup.scheduler
    expected = expected_outputs(list(request.prompt), request.sampling, config)
    for index, tokens in enumerate(record.outputs):
        whole = expected[index]
        _require(
            tokens == whole[: len(tokens)] and (index not in record.finished or len(tokens) == len(whole)),
            f"I2: request {request.number} output {index} has {tokens}, not {whole}",
        )
        enough = request.stop_after.get(index, len(whole))
        _require(
            record.outcome != "finished" or len(tokens) >= min(enough, len(whole)),
            f"I2: request {request.number} output {index} finished with {tokens} of {whole}",
        )


def _check_idle_worker(worker: WorkerProcess[DigestRunner]) -> None:
    engine, service = worker.engine, worker.service
    about = f"I1: {worker.incarnation}"
    _require(not engine.has_work and not engine._requests, f"{about} still runs {engine._requests}")
    _require(not engine.pool.num_used, f"{about} holds {engine.pool.num_used} blocks")
    _require(not service._routes, f"{about} has routes {list(service._routes)}")
    _require(not len(engine.scheduler.pulls), f"{about} still pulls")
    _require(not engine._loans, f"{about} still lends {engine._loans}")
    host = engine.scheduler.host_cache
    _require(host is None or not (host._reserved or host._reading), f"{about} keeps slots of its host memory")
    for link in service._links:
        _require(not link.requests and not len(link.compiling), f"{about} has requests of a router")


def _check_idle_router(world: World, router: RouterProcess) -> None:
    view, about = router.fleet.view, f"I1: {router.name}"
    for worker in view.workers():
        _require(not len(worker.booked), f"{about} has {len(worker.booked)} bookings at {worker.address}")
    for link in router.fleet.links.values():
        _require(not link._open, f"{about} has open requests at {link.address}")
    _require(not router.ledger.requests and not router.ledger.tokens, f"{about}: the ledger is not empty")
    _require(not router.registry.records(), f"{about}: requests are registered")
    _require(not router.placer._lines and not len(router.placer._line), f"{about}: somebody stands in line")
    alive = {worker.incarnation for worker in world.workers()}
    believed = set(view.incarnations().values())
    _require(believed == alive, f"{about} believes in {believed}, alive are {alive}")
    addresses = {seat.address for seat in world.seats}
    known = {worker.address for worker in view.workers()}
    _require(known == addresses, f"{about} knows {known}, there are {addresses}")


def _check_index(world: World) -> None:
    """Check for every prompt that the index equals each worker's cache, and that it lists no other worker."""
    twin, stride = world.index.twin, world.scenario.setup.scheduler.index_stride_blocks
    block_size = world.scenario.setup.scheduler.block_size
    alive = {worker.incarnation: worker for worker in world.workers()}
    standing = {str(record.incarnation) for record in answer(twin.directory())}
    _require(standing == alive.keys(), f"I5: in the index stand {standing}, alive are {set(alive)}")
    identity = world.routers[0].fleet.identity
    assert identity is not None
    root = identity.root(cluster_secret=SECRET, salt="")
    for record in world.records:
        tokens = [*record.request.prompt, *record.outputs[0]]
        names = chain(root, tokens, block_size)[stride - 1 :: stride]
        said = {
            str(holder.incarnation): (holder.depth, holder.host_blocks)
            for holder in answer(twin.lookup(names))
        }
        for incarnation, worker in alive.items():
            true = _depths(worker, chain(root, tokens, block_size), stride)
            _require(
                said.get(incarnation, (0, 0)) == true,
                f"I5: of prompt {record.request.number} {incarnation} holds {true}, "
                f"the index says {said.get(incarnation)}",
            )


def _depths(worker: WorkerProcess[DigestRunner], names: list[bytes], stride: int) -> tuple[int, int]:
    """Return the leading groups on the GPU, and those after them in host memory."""
    scheduler = worker.engine.scheduler
    on_gpu = len(scheduler.cache.match(names)) // stride  # type: ignore[arg-type]
    host = set(scheduler.host_cache._slots) if scheduler.host_cache is not None else set()
    held = [scheduler.cache.match([name]) or name in host for name in names]  # type: ignore[list-item]
    anywhere = next((depth for depth, is_held in enumerate(held) if not is_held), len(held)) // stride
    return on_gpu, anywhere - on_gpu


def _unrest(world: World) -> Iterator[str]:
    """Yield why a run does not come to rest."""
    yield f"I3: never at rest, {sum(not record.outcome for record in world.records)} requests run"
    for worker in world.workers():
        yield f"{worker.incarnation}: idle {worker.is_idle()}, {worker.publisher.state()}"
    for router in world.routers:
        view = router.fleet.view
        states = {worker.address: view.state(worker).name for worker in view.workers()}
        yield f"{router.name}: {states}"


async def check_ends(world: World) -> None:
    """Check that every live process ends when asked to, and leaves no task behind."""
    for worker in world.workers():
        await worker.leave()
    for router in world.routers:
        for task in router.process.tasks():
            task.cancel()
    await asyncio.sleep(10.0)
    left = [
        repr(task.get_coro())
        for process in run_processes(world)
        if process.state is ProcessState.RUNNING
        for task in process.tasks()
    ]
    _require(not left, f"tasks are left behind: {left}")
