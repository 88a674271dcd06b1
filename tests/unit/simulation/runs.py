"""One seed to one verdict: build the loop, run the world, check it, bury what is left."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from blockyard.proto.v1.session_pb2 import PullEnd
from blockyard.router.placement import policies
from blockyard.router.placement.pulls import Link
from blockyard.router.placement.splits import Split

from simulation.virtual_time import Stalled, VirtualLoop, bury

from .checks import Violation, check_at_rest, check_ends, check_now
from .scenario import Kind, Scenario, scenario
from .world import World, run_processes

NO_DEFECTS = ("refused worker",)
"""Beginnings of errors that are an operator's concern: a worker that stalls is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Result of one seed."""

    seed: int
    violation: str
    """Broken invariant. Empty: everything held."""
    log: tuple[tuple[object, ...], ...]
    outcomes: tuple[str, ...]
    struck: dict[Kind, int]
    pulls: Counter[str]
    """Pulls by how they ended, and those in both directions at once as "mutual"."""
    seconds: float
    """Virtual time."""
    num_turns: int
    num_moves: int
    """Preempted sequences that workers gave back, to go on elsewhere."""
    num_splits: int
    """Requests that one worker began and another continued, as planned."""


def run(seed: int) -> Run:
    return run_scenario(scenario(seed))


def run_scenario(chosen: Scenario) -> Run:
    loop = VirtualLoop()
    world = World(chosen, loop)
    world.on_look = check_now
    violation = ""
    try:
        with _complaints() as complaints, _free_pulls(chosen.pulls_are_free), _eager_splits():
            loop.run_until_complete(_checked(world))
        if complaints:
            raise Violation(f"defects are logged: {complaints}")
    except (Violation, AssertionError, Stalled) as error:
        violation = f"{type(error).__name__}: {error}"
    finally:
        world.is_over = True
        bury(loop, run_processes(world))
    return Run(
        seed=chosen.seed,
        violation=violation,
        log=tuple(world.log),
        outcomes=tuple(record.outcome for record in world.records),
        struck={kind: count for kind, count in world.struck.items() if count},
        pulls=_pulls(world),
        seconds=world.now,
        num_turns=loop.num_ticks,
        num_splits=sum(router.relay.num_splits for router in (*world.routers, *world.dead_routers)),
        num_moves=sum(life.engine.scheduler.num_moves for seat in world.seats for life in seat.lives),
    )


def _pulls(world: World) -> Counter[str]:
    ends = Counter(PullEnd.Name(ended.result.end).removeprefix("PULL_END_") for ended in world.pulls)
    return ends + Counter({"mutual": world.transfers.num_mutual})


class _Complaints(logging.Handler):
    """Errors that the product logs about defects of its own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not (text := record.getMessage()).startswith(NO_DEFECTS):
            self.texts.append(text)


@contextmanager
def _free_pulls(are_free: bool) -> Iterator[None]:
    """Let routers estimate, or not, that pulls take no time."""
    right = Link.time_ms
    if are_free:
        Link.time_ms = lambda link, tokens, source: 0.0  # type: ignore[method-assign]
    try:
        yield
    finally:
        Link.time_ms = right  # type: ignore[method-assign]


@contextmanager
def _eager_splits() -> Iterator[None]:
    """Let routers choose every split that is possible. In the model here the sequences of so few workers delay no
    prompt for long."""
    right = policies.best_split

    def best_split(*given: Any, **named: Any) -> Split | None:
        split = right(*given, **named)
        return split and split._replace(is_chosen=True)

    policies.best_split = best_split
    try:
        yield
    finally:
        policies.best_split = right


@contextmanager
def _complaints() -> Iterator[list[str]]:
    logger, handler = logging.getLogger("blockyard"), _Complaints()
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


async def _checked(world: World) -> None:
    await world.run()
    check_at_rest(world)
    await check_ends(world)
