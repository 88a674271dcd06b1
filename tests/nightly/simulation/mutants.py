"""The product, broken on purpose in one place each: the simulation must find each of them.

Each replaces a method of the product during a context.
"""

import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from blockyard.proto.naming.block_hash import pack_tokens
from blockyard.router.cluster.bookings import Bookings
from blockyard.router.cluster.link import EngineLink
from blockyard.router.cluster.view import ClusterView
from blockyard.router.generation.joined_outputs import Outputs
from blockyard.worker.cache.block_pool import BlockPool
from blockyard.worker.cache.block_tables import BlockTables
from blockyard.worker.cache.prefix_cache import PrefixCache
from blockyard.worker.engine import Engine
from blockyard.worker.indexing.net_difference import NetDifference
from blockyard.worker.indexing.publisher import IndexPublisher
from blockyard.worker.scheduling.pulls import Pulls
from blockyard.worker.scheduling.scheduler import Scheduler
from blockyard.worker.session.outbox import Outbox
from blockyard.worker.session.router_streams import Routes
from blockyard.worker.transfer.rules import Avoided
from blockyard.worker.transfer.wire import Connection, ProtocolError

from simulation import transfers

Change = tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]
"""A class or a module, its method, and from the right method to the broken one."""
Mutant = tuple[Change, ...]


def _repeated_tokens_are_shown(right: Callable[..., Any]) -> Callable[..., Any]:
    """Whoever begins anew is heard from the beginning."""

    def take(outputs: Outputs, tokens: Any) -> Any:
        known = len(outputs._tokens[tokens.index])
        chunk = right(outputs, replace(tokens, offset=known))
        return None if chunk is None else replace(chunk, offset=tokens.offset)

    return take


def _a_token_is_doubled(right: Callable[..., Any]) -> Callable[..., Any]:
    def take(outputs: Outputs, tokens: Any) -> Any:
        chunk = right(outputs, tokens)
        if chunk is None or chunk.offset != 5:
            return chunk
        return replace(chunk, token_ids=[*chunk.token_ids, *chunk.token_ids[-1:]])

    return take


def _replay_sends_the_last_token_twice(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda outputs: right(outputs) + pack_tokens(outputs._tokens[0][-1:]) if right(outputs) else b""


def _every_fifth_is(wrong: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
    def broken(right: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def method(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            return (wrong if calls % 5 == 0 else right)(*arguments, **named)

        return method

    return broken


def _nothing(*_: Any, **__: Any) -> None:
    """Instead of what should be done."""


def _no_longer_open(bookings: Bookings, placed: Any) -> None:
    bookings._open.discard(placed)


def _names_of_the_last(right: Callable[..., Any]) -> Callable[..., Any]:
    """One block too many is found where there is one."""

    def match(cache: PrefixCache, names: Any) -> Any:
        blocks = right(cache, names)
        return [*blocks[:-1], blocks[0]] if len(blocks) > 2 else blocks

    return match


def _renewal_is_not_heard(right: Callable[..., Any]) -> Callable[..., Any]:
    async def renew(publisher: IndexPublisher, berth: Any) -> None:
        await right(publisher, berth)
        publisher._berth = publisher._berth or berth

    return renew


def _removals_get_lost(right: Callable[..., Any]) -> Callable[..., Any]:
    def take(difference: NetDifference, limit: int) -> tuple[bytes, ...]:
        return tuple(right(difference, limit)[1:])

    return take


def _one_block_stays(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda pool, blocks: right(pool, blocks[1:] if len(blocks) > 6 else blocks)


def _silence_is_fine(right: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(link: EngineLink, *arguments: Any, **named: Any) -> None:
        right(link, *arguments, **(named | {"lost_seconds": 1000.0}))

    return __init__


def _merged_rows_begin_at_the_newest(right: Callable[..., Any]) -> Callable[..., Any]:
    def add(outbox: Outbox, handle: int, output: Any) -> None:
        right(outbox, handle, output)
        row = outbox._rows.get((handle, output.index))
        if row is not None and output.token_ids:
            row.token_offset = output.token_offset

    return add


def _given_back_without_a_word(right: Callable[..., Any]) -> Callable[..., Any]:
    def take_given_back(scheduler: Scheduler) -> list[Any]:
        right(scheduler)
        return []

    return take_given_back


def _dead_are_believed_in(right: Callable[..., Any]) -> Callable[..., Any]:
    def disconnected(view: ClusterView, address: str, reason: str) -> None:
        worker = view.at(address)
        right(view, address, reason)
        if worker is not None:
            worker.link = type(worker.link).ACCEPTED
            worker.last_heard = float("inf")

    return disconnected


def _blocks_of_a_cut_pull_count(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda engine, pull, num_blocks: right(engine, pull, len(pull.slots))


def _slots_of_a_cancelled_pull_are_free(right: Callable[..., Any]) -> Callable[..., Any]:
    """The receiver has not ended yet."""

    def leave(pulls: Pulls, sequence: Any) -> None:
        pull = pulls._pull_of.get(sequence.sequence_id)
        right(pulls, sequence)
        if pull is not None and pull.is_cancelled:
            host_cache = pulls._tables.host_cache
            assert host_cache is not None
            host_cache.release(pull.slots)
            pull.deadline = -1.0

    return leave


def _freed_slots_stay(right: Callable[..., Any]) -> Callable[..., Any]:
    def end(pulls: Pulls, pull: Any, num_received: int) -> Any:
        if pull.deadline < 0:
            pull.slots, num_received = [], 0
        return right(pulls, pull, num_received)

    return end


def _lent_blocks_are_not_kept(right: Callable[..., Any]) -> Callable[..., Any]:
    def lend(tables: BlockTables, *arguments: Any, **named: Any) -> Any:
        loan = right(tables, *arguments, **named)
        tables.pool.release(loan.blocks)
        return loan

    return lend


def _unkept_blocks_are_not_released(right: Callable[..., Any]) -> Callable[..., Any]:
    def end_loan(tables: BlockTables, loan: Any) -> None:
        loan.blocks, blocks = [], loan.blocks
        tables._lent.subtract(blocks)
        right(tables, loan)

    return end_loan


def _any_bytes_will_do(right: Callable[..., Any]) -> Callable[..., Any]:
    def receive_block(connection: Connection, index: int, into: memoryview) -> int:
        found, checksum = struct.unpack("<II", connection._read(8))
        if found != index:
            raise ProtocolError("another block")
        connection._fill(into)
        return int(checksum)

    return receive_block


def _any_block_will_do(right: Callable[..., Any]) -> Callable[..., Any]:
    def receive_block(connection: Connection, index: int, into: memoryview) -> int:
        _, checksum = struct.unpack("<II", connection._read(8))
        connection._fill(into)
        if zlib.crc32(into) != checksum:
            raise ProtocolError("other bytes")
        return int(checksum)

    return receive_block


def _every_incarnation_will_do(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda request, facts: right(request, replace(facts, incarnation=request.incarnation))


def _others_pulls_are_not_seen(right: Callable[..., Any]) -> Callable[..., Any]:
    def begin(pulls: Pulls, *arguments: Any) -> Any:
        known, pulls._under_way = pulls._under_way, {}
        pull = right(pulls, *arguments)
        pulls._under_way = known | pulls._under_way
        return pull

    return begin


MUTANTS: dict[str, Mutant] = {
    "relay: a replay begins anew, and its repeated tokens are shown": (
        (Outputs, "resumed", lambda right: lambda outputs: b""),
        (Outputs, "take", _repeated_tokens_are_shown),
    ),
    "relay: a token is doubled": ((Outputs, "take", _a_token_is_doubled),),
    "relay: a replay sends the last token twice": ((Outputs, "resumed", _replay_sends_the_last_token_twice),),
    "relay: a request is not cancelled": ((EngineLink, "cancel", lambda right: _nothing),),
    "link: requests do not hear of the end": ((EngineLink, "_end_all", lambda right: _nothing),),
    "link: silence is fine": ((EngineLink, "__init__", _silence_is_fine),),
    "view: the dead are believed in": ((ClusterView, "disconnected", _dead_are_believed_in),),
    "bookings: one stays": ((ClusterView, "ended", _every_fifth_is(_nothing)),),
    "bookings: a sum is not taken back": ((Bookings, "remove", _every_fifth_is(_no_longer_open)),),
    "session: the end of a stream cancels nothing": ((Routes, "cancel_all", lambda right: _nothing),),
    "scheduler: what moves is ended without a word": (
        (Scheduler, "take_given_back", _given_back_without_a_word),
    ),
    "outbox: merged rows begin at the newest": ((Outbox, "add", _merged_rows_begin_at_the_newest),),
    "publisher: a removal is skipped": ((NetDifference, "take_removed", _removals_get_lost),),
    "publisher: does not hear that the index forgot": ((IndexPublisher, "_renew", _renewal_is_not_heard),),
    "pool: a block stays": ((BlockPool, "release", _one_block_stays),),
    "cache: a wrong block is found": ((PrefixCache, "match", _names_of_the_last),),
    "pulls: a pull that was cut counts as whole": ((Engine, "end_pull", _blocks_of_a_cut_pull_count),),
    "pulls: slots are free while their receiver still writes": (
        (Pulls, "leave", _slots_of_a_cancelled_pull_are_free),
        (Pulls, "end", _freed_slots_stay),
    ),
    "pulls: a request waits for its pull for ever": ((Pulls, "release_late", lambda right: _nothing),),
    "pulls: each request pulls for itself": ((Pulls, "begin", _others_pulls_are_not_seen),),
    "loans: lent blocks may be evicted": (
        (BlockTables, "lend", _lent_blocks_are_not_kept),
        (BlockTables, "end_loan", _unkept_blocks_are_not_released),
    ),
    "loans: one does not end": ((Engine, "end_loan", _every_fifth_is(_nothing)),),
    "transfers: no checksum is compared": ((Connection, "receive_block", _any_bytes_will_do),),
    "transfers: no index is compared": ((Connection, "receive_block", _any_block_will_do),),
    "transfers: no incarnation is compared": ((transfers, "refusal_of", _every_incarnation_will_do),),
    "transfers: a source of harmed blocks is asked again": ((Avoided, "note", lambda right: _nothing),),
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
