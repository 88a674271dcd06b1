"""The product, broken on purpose in one place each: the simulation must find each of them.

Each replaces a method of the product during a context. More are in tests/nightly/faults/mutants_*.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from blockyard.router.cluster.bookings import Bookings
from blockyard.router.cluster.link import EngineLink
from blockyard.router.cluster.view import ClusterView
from blockyard.router.generation.joined_outputs import Outputs
from blockyard.worker.cache.block_pool import BlockPool
from blockyard.worker.cache.block_tables import BlockTables
from blockyard.worker.cache.prefix_cache import PrefixCache
from blockyard.worker.engine import Engine
from blockyard.worker.indexing.net_difference import NetDifference
from blockyard.worker.scheduling.pulls import Pulls
from blockyard.worker.scheduling.scheduler import Scheduler
from blockyard.worker.session.outbox import Outbox
from blockyard.worker.session.router_streams import Routes
from blockyard.worker.transfer.rules import Avoided

from simulation import transfers

Method = Callable[..., Any]
Change = tuple[Any, str, Callable[[Method], Method]]
"""A class or a module, its method, and from the right method to the broken one."""


def _nothing(_: Method) -> Method:
    """Do nothing instead."""
    return lambda *arguments, **named: None


def _result(change: Callable[[Any], Any]) -> Callable[[Method], Method]:
    """Return something else than the right result."""
    return lambda right: lambda *arguments, **named: change(right(*arguments, **named))


def _each_fifth(wrong: Method) -> Callable[[Method], Method]:
    """Do something else in each fifth call."""

    def broken(right: Method) -> Method:
        calls = 0

        def method(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            return (wrong if calls % 5 == 0 else right)(*arguments, **named)

        return method

    return broken


def _doubled(chunk: Any) -> Any:
    if chunk is None or chunk.offset != 5:
        return chunk
    return replace(chunk, token_ids=[*chunk.token_ids, *chunk.token_ids[-1:]])


def _silence_is_fine(right: Method) -> Method:
    return lambda link, *arguments, **named: right(link, *arguments, **(named | {"lost_seconds": 1000.0}))


def _dead_are_believed_in(right: Method) -> Method:
    def disconnected(view: ClusterView, address: str, reason: str) -> None:
        worker = view.at(address)
        right(view, address, reason)
        if worker is not None:
            worker.link, worker.last_heard = type(worker.link).ACCEPTED, float("inf")

    return disconnected


def _merged_rows_begin_at_the_newest(right: Method) -> Method:
    def add(outbox: Outbox, handle: int, output: Any) -> None:
        right(outbox, handle, output)
        row = outbox._rows.get((handle, output.index))
        if row is not None and output.token_ids:
            row.token_offset = output.token_offset

    return add


def _lent_blocks_are_not_kept(right: Method) -> Method:
    def lend(tables: BlockTables, *arguments: Any, **named: Any) -> Any:
        loan = right(tables, *arguments, **named)
        tables.pool.release(loan.blocks)
        return loan

    return lend


def _unkept_blocks_are_not_released(right: Method) -> Method:
    def end_loan(tables: BlockTables, loan: Any) -> None:
        loan.blocks, blocks = [], loan.blocks
        tables._lent.subtract(blocks)
        right(tables, loan)

    return end_loan


def _every_incarnation_will_do(right: Method) -> Method:
    return lambda request, facts: right(request, replace(facts, incarnation=request.incarnation))


MUTANTS: dict[str, tuple[Change, ...]] = {
    "relay: a token is doubled": ((Outputs, "take", _result(_doubled)),),
    "relay: a request is not cancelled": ((EngineLink, "cancel", _nothing),),
    "link: requests do not hear of the end": ((EngineLink, "_end_all", _nothing),),
    "link: silence is fine": ((EngineLink, "__init__", _silence_is_fine),),
    "view: the dead are believed in": ((ClusterView, "disconnected", _dead_are_believed_in),),
    "bookings: one stays": ((ClusterView, "ended", _each_fifth(lambda *_: None)),),
    "bookings: a sum is not taken back": (
        (Bookings, "remove", _each_fifth(lambda bookings, placed: bookings._open.discard(placed))),
    ),
    "session: the end of a stream cancels nothing": ((Routes, "cancel_all", _nothing),),
    "scheduler: what moves is ended without a word": (
        (Scheduler, "take_given_back", _result(lambda given_back: [])),
    ),
    "outbox: merged rows begin at the newest": ((Outbox, "add", _merged_rows_begin_at_the_newest),),
    "publisher: a removal is skipped": ((NetDifference, "take_removed", _result(lambda names: names[1:])),),
    "pool: a block stays": (
        (
            BlockPool,
            "release",
            lambda right: lambda pool, blocks, **named: right(pool, blocks[len(blocks) > 6 :], **named),
        ),
    ),
    "cache: a wrong block is found": (
        (PrefixCache, "match", _result(lambda found: [*found[:-1], found[0]] if len(found) > 2 else found)),
    ),
    "pulls: a pull that was cut counts as whole": (
        (Engine, "end_pull", lambda right: lambda engine, pull, _: right(engine, pull, len(pull.slots))),
    ),
    "pulls: a request waits for its pull for ever": ((Pulls, "release_late", _nothing),),
    "loans: lent blocks may be evicted": (
        (BlockTables, "lend", _lent_blocks_are_not_kept),
        (BlockTables, "end_loan", _unkept_blocks_are_not_released),
    ),
    "loans: one does not end": ((Engine, "end_loan", _each_fifth(lambda *_: None)),),
    "transfers: no incarnation is compared": ((transfers, "refusal_of", _every_incarnation_will_do),),
    "transfers: a source of harmed blocks is asked again": ((Avoided, "note", _nothing),),
}


@contextmanager
def broken(name: str) -> Iterator[None]:
    """Run the context with this mutant in the product."""
    rights = [(owner, method, getattr(owner, method)) for owner, method, _ in MUTANTS[name]]
    for owner, method, change in MUTANTS[name]:
        setattr(owner, method, change(getattr(owner, method)))
    try:
        yield
    finally:
        for owner, method, right in rights:
            setattr(owner, method, right)
