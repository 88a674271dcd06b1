"""The product, broken on purpose in one place each: the simulation must find each of them.

Each replaces a method of the product during a test. More are in tests/nightly/faults/mutants_*.py, which edit sources.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from blockyard.router.cluster.link import EngineLink
from blockyard.router.cluster.view import ClusterView
from blockyard.router.generation.joined_outputs import Outputs
from blockyard.worker.cache.prefix_cache import PrefixCache
from blockyard.worker.engine import Engine
from blockyard.worker.indexing.net_difference import NetDifference
from blockyard.worker.scheduling.pulls import Pulls
from blockyard.worker.scheduling.scheduler import Scheduler
from blockyard.worker.session.router_streams import Routes
from blockyard.worker.transfer.rules import Avoided

from simulation import transfers

Method = Callable[..., Any]


def _nothing(_: Method) -> Method:
    """Do nothing instead."""
    return lambda *arguments, **named: None


def _result(change: Callable[[Any], Any]) -> Callable[[Method], Method]:
    """Return something else than the right result."""
    return lambda right: lambda *arguments, **named: change(right(*arguments, **named))


def _doubled(chunk: Any) -> Any:
    if chunk is None or chunk.offset != 5:
        return chunk
    return replace(chunk, token_ids=[*chunk.token_ids, *chunk.token_ids[-1:]])


def _every_incarnation_will_do(right: Method) -> Method:
    return lambda request, facts: right(request, replace(facts, incarnation=request.incarnation))


MUTANTS: dict[str, tuple[Any, str, Callable[[Method], Method]]] = {
    "relay: a token is doubled": (Outputs, "take", _result(_doubled)),
    "relay: a request is not cancelled": (EngineLink, "cancel", _nothing),
    "link: requests do not hear of the end": (EngineLink, "_end_all", _nothing),
    "bookings: they stay": (ClusterView, "ended", _nothing),
    "session: the end of a stream cancels nothing": (Routes, "cancel_all", _nothing),
    "scheduler: what moves is ended without a word": (Scheduler, "take_given_back", _result(lambda _: [])),
    "publisher: a removal is skipped": (NetDifference, "take_removed", _result(lambda names: names[1:])),
    "cache: a wrong block is found": (
        PrefixCache,
        "match",
        _result(lambda found: [*found[:-1], found[0]] if len(found) > 2 else found),
    ),
    "pulls: a pull that was cut counts as whole": (
        Engine,
        "end_pull",
        lambda right: lambda engine, pull, _: right(engine, pull, len(pull.slots)),
    ),
    "pulls: a request waits for its pull for ever": (Pulls, "release_late", _nothing),
    "loans: they do not end": (Engine, "end_loan", _nothing),
    "transfers: no incarnation is compared": (transfers, "refusal_of", _every_incarnation_will_do),
    "transfers: a source of harmed blocks is asked again": (Avoided, "note", _nothing),
}
"""A class or a module, its method, and from the right method to the broken one."""
