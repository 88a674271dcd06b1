"""The product, broken on purpose in one place each: the simulation must find each of them.

Each replaces a method of the product during a context.
"""

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
from blockyard.worker.cache.prefix_cache import PrefixCache
from blockyard.worker.indexing.net_difference import NetDifference
from blockyard.worker.indexing.publisher import IndexPublisher
from blockyard.worker.scheduling.scheduler import Scheduler
from blockyard.worker.session.outbox import Outbox
from blockyard.worker.session.session import SessionService

Change = tuple[type, str, Callable[[Callable[..., Any]], Callable[..., Any]]]
"""A class, its method, and from the right method to the broken one."""
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
    "session: the end of a stream cancels nothing": (
        (SessionService, "_cancel_all", lambda right: _nothing),
    ),
    "scheduler: what moves is ended without a word": (
        (Scheduler, "take_given_back", _given_back_without_a_word),
    ),
    "outbox: merged rows begin at the newest": ((Outbox, "add", _merged_rows_begin_at_the_newest),),
    "publisher: a removal is skipped": ((NetDifference, "take_removed", _removals_get_lost),),
    "publisher: does not hear that the index forgot": ((IndexPublisher, "_renew", _renewal_is_not_heard),),
    "pool: a block stays": ((BlockPool, "release", _one_block_stays),),
    "cache: a wrong block is found": ((PrefixCache, "match", _names_of_the_last),),
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
