"""Rules: which requests a lender refuses, which sources a receiver avoids, and what a pull's result means.

Pure: time is an argument. The simulation follows the same rules without sockets and threads.
"""

from dataclasses import dataclass

from blockyard.proto.naming.block_hash import NAME_BYTES
from blockyard.proto.v1.session_pb2 import PullEnd, PullRefusal, PullReport, PullRequest
from blockyard.worker.engine import Engine
from blockyard.worker.memory.transferable import TransferableMemory
from blockyard.worker.scheduling.pulls import Pull

MAX_LOANS = 4
"""Pulls served at once. They share one link, so more would only end later."""
QUEUE_SHARE = 0.5
"""Share of a request's time in which it may wait for its turn. After that it is refused."""
AVOIDED_SECONDS = {
    PullEnd.PULL_END_CORRUPT: 60.0,
    PullEnd.PULL_END_CUT: 5.0,
    PullEnd.PULL_END_LATE: 5.0,
    PullEnd.PULL_END_UNREACHABLE: 5.0,
}
"""Time for which nothing is fetched from a source after a pull that ended so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LenderFacts:
    """Facts about this worker that a request must agree with."""

    incarnation: str
    layout: str
    """The words of `layout_of`."""
    max_blocks: int
    """Blocks of the longest context."""


def layout_of(model_fingerprint: str, memory: TransferableMemory) -> str:
    """Return the words that both ends of a pull must have in common."""
    kind = memory.kind
    return f"model={model_fingerprint} {kind.layout} {kind.arithmetic} bytes={memory.block_bytes}"


def refusal_of(request: PullRequest, facts: LenderFacts) -> PullRefusal:
    """Return why a lender refuses a request. UNSPECIFIED: it does not."""
    if request.incarnation != facts.incarnation:
        return PullRefusal.PULL_REFUSAL_INCARNATION
    if request.layout != facts.layout:
        return PullRefusal.PULL_REFUSAL_LAYOUT
    if bool(request.names) is bool(request.trial_bytes) or len(request.names) % NAME_BYTES:
        return PullRefusal.PULL_REFUSAL_INVALID
    return PullRefusal.PULL_REFUSAL_UNSPECIFIED


class ToldOnce:
    """Remembers what a log has been told, so that a pair of workers fills no log. Any thread may ask."""

    def __init__(self, most: int = 256) -> None:
        self._told: dict[object, None] = {}
        self._most = most

    def is_new(self, fact: object) -> bool:
        """Return whether this fact was not told lately, and note it. The oldest of many is forgotten."""
        if fact in self._told:
            return False
        self._told[fact] = None
        if len(self._told) > self._most:
            self._told.pop(next(iter(self._told)), None)
        return True


class Avoided:
    """The sources that have failed, by address. A dictionary's operations are enough for several threads."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def holds(self, source: str, now: float) -> bool:
        """Return whether nothing is fetched from a source yet."""
        return now < self._until.get(source, 0.0)

    def note(self, source: str, end: PullEnd, *, has_answer: bool, now: float) -> None:
        """Take note how a pull from a source ended."""
        is_only_slow = end == PullEnd.PULL_END_LATE and has_answer
        if end in AVOIDED_SECONDS and not is_only_slow:  # the measured rate tells routers of a slow one
            self._until[source] = now + AVOIDED_SECONDS[end]


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """Result of a pull."""

    end: PullEnd
    num_blocks: int = 0
    """Leading blocks that arrived intact."""
    num_bytes: int = 0
    setup_seconds: float = 0.0
    """Time until the source's answer."""
    transfer_seconds: float = 0.0
    """Time from there to the last byte."""
    has_answer: bool = False
    num_arrived: float = 0.0
    """Blocks that have arrived, with the part of the last one."""
    refusal: PullRefusal = PullRefusal.PULL_REFUSAL_UNSPECIFIED
    """Why the source refused."""

    @property
    def is_measured(self) -> bool:
        """Return whether it tells how fast blocks come from other workers."""
        is_done = self.end in (PullEnd.PULL_END_WHOLE, PullEnd.PULL_END_FEWER)
        return (is_done and self.num_arrived > 0) or self.end == PullEnd.PULL_END_LATE


def take_pull(engine: Engine, pull: Pull, result: PullResult) -> PullReport:
    """Give the engine what a pull has brought, and return the report for its router."""
    engine.end_pull(pull, result.num_blocks)
    # The engine takes blocks between two steps. Until then no request has them.
    taken_seconds = engine.seconds_since(pull.began) - result.transfer_seconds
    take_measurement(engine, result, setup_seconds=max(result.setup_seconds, taken_seconds))
    return PullReport(
        end=result.end,
        num_blocks=result.num_blocks,
        num_bytes=result.num_bytes,
        setup_seconds=result.setup_seconds,
        transfer_seconds=result.transfer_seconds,
        refusal=result.refusal,
    )


def take_measurement(engine: Engine, result: PullResult, *, setup_seconds: float) -> None:
    """Count a pull or a trial in the engine's averages, if it tells anything about the link. `setup_seconds` is its
    time without that of the bytes."""
    if not result.is_measured:
        return
    if result.has_answer:
        num_bytes = result.num_arrived * engine.bytes_per_block
        engine.pull_rates.answered(setup_seconds, num_bytes, result.transfer_seconds)
    else:
        engine.pull_rates.unanswered(setup_seconds)
