"""A router in virtual time: the real view of workers and the real `place()`, over the index twin.

Owns the line of those that found no worker and the record of each request. Tokenising takes no time here.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from blockyard.deploy.bench.requests import PlannedRequest
from blockyard.proto.block_hash import chain
from blockyard.proto.prefix_index import PrefixIndex, WorkerId
from blockyard.router.bookings import Placed
from blockyard.router.cluster_view import CachedDepth, ClusterView
from blockyard.router.placement import PlacementRequest, place
from blockyard.router.placement_config import PlacementConfig, PolicyName
from blockyard.router.scoring import Score
from blockyard.router.sessions import SessionMemory
from blockyard.worker.engine_types import SequenceOutput

from bench.simulation.clock import Events, VirtualClock, answer
from bench.simulation.workers import NETWORK_SECONDS, ROOT, SimulatedWorker, Submission

LOOKUP_SECONDS = 0.001
"""Names, Redis and the choice together."""
RETRY_SECONDS = 0.05
"""The first of a line looks again."""


@dataclass(slots=True, kw_only=True)
class Record:
    """What became of one request. Times are in seconds since the start; the first token's is when the router had it."""

    request: PlannedRequest
    arrived: float
    worker: str = ""
    first_token: float | None = None
    ended: float | None = None
    cached_tokens: int = 0
    num_refusals: int = 0


@dataclass(slots=True, eq=False)
class _Waiting:
    record: Record
    names: list[bytes]
    token_ids: list[int]
    placed: Placed | None = None
    chosen_at: float = 0.0


class SimulatedRouter:
    """Knows of other routers only what index and load reports say."""

    def __init__(
        self,
        workers: dict[str, SimulatedWorker],
        index: PrefixIndex,
        clock: VirtualClock,
        events: Events,
        *,
        policy: PolicyName,
        config: PlacementConfig,
        block_size: int,
        chance: Random,
        on_end: Callable[[Record], None],
    ) -> None:
        self._workers, self._index, self._clock, self._events = workers, index, clock, events
        self._policy: PolicyName = policy
        self._config, self._block_size, self._chance, self._on_end = config, block_size, chance, on_end
        self._view = ClusterView(suspect_seconds=1e9, lost_seconds=2e9, clock=clock, config=config)
        self._lines: dict[str, deque[_Waiting]] = {address: deque() for address in workers}
        self._open: dict[int, _Waiting] = {}
        self._sessions = SessionMemory(config.remembered_sessions)
        self._turn = 0
        self._will_retry = False
        for address, worker in workers.items():
            self._view.known(address)
            self._view.accepted(address, worker.hello())
            worker.listen(self)

    def arrive(self, record: Record) -> None:
        token_ids = record.request.token_ids()
        waiting = _Waiting(record, chain(ROOT, token_ids, self._block_size), token_ids)
        self._open[record.request.number] = waiting
        self._events.after(LOOKUP_SECONDS, lambda: self._place(waiting))

    # What workers say

    def report(self, address: str, load: object) -> None:
        self._view.heard(address, load)  # type: ignore[arg-type]
        self._serve_line(address)

    def output(self, number: int, output: SequenceOutput) -> None:
        waiting = self._open[number]
        record, placed = waiting.record, waiting.placed
        assert placed is not None
        if record.first_token is None:
            record.first_token, record.cached_tokens = self._clock.now, output.cached_tokens
            self._view.started(placed)
            self._serve_line(placed.address)
        if output.is_last:
            record.ended = self._clock.now
            self._view.ended(placed)
            del self._open[number]
            self._on_end(record)
            self._serve_line(placed.address)

    def refused(self, number: int) -> None:
        waiting = self._open[number]
        assert waiting.placed is not None
        self._view.ended(waiting.placed, busy=True)
        waiting.record.num_refusals += 1
        self._place(waiting, is_back=True)

    # Placing

    def _place(self, waiting: _Waiting, *, is_back: bool = False) -> None:
        """Chooses a worker, and stands in its line."""
        chosen = self._choose(waiting)
        waiting.placed = self._view.placed(
            chosen.address,
            names=waiting.names,
            prompt_tokens=len(waiting.token_ids),
            uncached_tokens=chosen.uncached_tokens,
            blocks=-(-chosen.needed_tokens // self._block_size),
        )
        waiting.chosen_at = self._clock.now
        line = self._lines[chosen.address]
        if is_back:
            line.appendleft(waiting)
        else:
            line.append(waiting)
        self._serve_line(chosen.address)

    def _serve_line(self, address: str) -> None:
        line = self._lines[address]
        while line and self._view.has_room(address):
            self._send(line.popleft())
        if line and not self._will_retry:
            self._will_retry = True
            self._events.after(RETRY_SECONDS, self._retry)

    def _retry(self) -> None:
        self._will_retry = False
        for address, line in self._lines.items():
            self._serve_line(address)
            while line and self._clock.now - line[0].chosen_at > self._config.reconsider_seconds:
                self._reconsider(line)
                if line and line[0].chosen_at == self._clock.now:
                    break

    def _reconsider(self, line: deque[_Waiting]) -> None:
        """The first of a line goes to another where that has become cheaper."""
        waiting = line.popleft()
        assert waiting.placed is not None
        self._view.ended(waiting.placed)
        self._place(waiting, is_back=True)

    def _choose(self, waiting: _Waiting) -> Score:
        names, prompt_tokens = waiting.names, len(waiting.token_ids)
        candidates = self._view.candidates(names, prompt_tokens, self._depths(names))
        session = waiting.record.request.session
        first = max(self._config.rendezvous_tokens // self._block_size, 1)
        request = PlacementRequest(
            prompt_tokens=prompt_tokens,
            prefix_key=names[min(first, len(names)) - 1] if names else b"",
            turn=self._turn,
            session_key=session.encode(),
            session_worker=self._sessions.last_worker(session) if session else None,
        )
        self._turn += 1
        return place(request, candidates, self._policy, self._chance, self._config).chosen

    def _send(self, waiting: _Waiting) -> None:
        assert waiting.placed is not None
        self._view.sent(waiting.placed)
        worker = self._workers[waiting.placed.address]
        waiting.record.worker = worker.worker_id
        if waiting.record.request.session:
            self._sessions.served(waiting.record.request.session, worker.worker_id)
        submission = Submission(
            request=waiting.record.request, names=waiting.names, token_ids=waiting.token_ids, listener=self
        )
        self._events.after(NETWORK_SECONDS, lambda: worker.submit(submission))

    def _depths(self, names: list[bytes]) -> dict[WorkerId, CachedDepth]:
        holders = answer(self._index.lookup(names))
        return {holder.worker_id: CachedDepth(blocks=holder.depth) for holder in holders}
