"""Bookings: the requests that this router has placed on one worker and that have not ended, with sums over them.

    placed -> (waits in dispatch/ until the worker has room) -> sent -> started -> over

Bookings include the prefixes that these requests will soon store. Pure. Each change updates the sums, because every
placement reads the sums of every worker. Does not own the load that the worker reports, or the combination of the two
(view.py).
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blockyard.proto.step_costs import pairs_of
from blockyard.router.placement.config import PolicyName
from blockyard.router.placement.pulls import PullPlan
from blockyard.router.placement.scoring import Score


class Choice(NamedTuple):
    """How a worker was chosen, for traces."""

    at: float
    """Time on the placer's clock."""
    policy: PolicyName
    score: Score
    num_candidates: int
    """Workers whose costs were compared."""


@dataclass(slots=True, kw_only=True, eq=False)
class Placed:
    """A request that this router has placed on a worker and that has not ended."""

    address: str
    names: Sequence[bytes]
    """Names of the prompt's full blocks."""
    prompt_tokens: int
    uncached_tokens: int
    """Prompt tokens that the worker is expected to compute, because it has not cached them."""
    blocks: int
    """Blocks that the request is expected to take from the worker's pool."""
    promised_blocks: int = 0
    """Leading blocks of the prompt that the worker has cached according to the index alone."""
    pull: PullPlan | None = None
    """Blocks that the worker is to fetch first. None: none, or the pull has ended."""
    is_split: bool = False
    """Whether another worker is to continue the request from its first tokens on."""
    adapter: str = ""
    """Fingerprint of the LoRA adapter that the worker needs for it. Empty: none."""
    sent: bool = False
    started: bool = False
    choice: Choice | None = None
    handle: int = 0
    """Number of the request on the stream to the worker. Later requests have higher ones."""

    @property
    def pairs(self) -> int:
        return pairs_of(self.prompt_tokens - self.uncached_tokens, self.uncached_tokens)


@dataclass(slots=True)
class Sums:
    requests: int = 0
    prompt_tokens: int = 0
    blocks: int = 0
    unstarted: int = 0
    """Requests without a first output."""
    unstarted_tokens: int = 0
    """Prompt tokens that the worker has to compute for unstarted requests."""
    unstarted_pairs: int = 0
    """Pairs: those tokens times the tokens that each of them attends to."""

    def count(self, placed: Placed, sign: int) -> None:
        self.requests += sign
        self.prompt_tokens += sign * placed.prompt_tokens
        self.blocks += sign * placed.blocks
        if not placed.started:
            self.count_unstarted(placed, sign)

    def count_unstarted(self, placed: Placed, sign: int) -> None:
        self.unstarted += sign
        self.unstarted_tokens += sign * placed.uncached_tokens
        self.unstarted_pairs += sign * placed.pairs


class Expectations:
    """Workers that expect a prefix, by its first name. A placement asks only them for their speculative prefixes."""

    def __init__(self) -> None:
        self._workers: dict[bytes, dict[str, None]] = {}
        self._noted: deque[tuple[bytes, str]] = deque()
        """All entries, each once, in the order of their last check."""

    def note(self, name: bytes, address: str) -> None:
        workers = self._workers.setdefault(name, {})
        if address not in workers:
            workers[address] = None
            self._noted.append((name, address))

    def workers(self, name: bytes) -> list[str]:
        """Return the addresses of workers that may expect a prefix which begins with this name."""
        return list(self._workers.get(name, ()))

    def sweep(self, expects: Callable[[bytes, str], bool]) -> None:
        """Check the two entries that were checked longest ago, and drop those that have passed. Called for each
        placement, it keeps few of those."""
        for _ in range(min(2, len(self._noted))):
            name, address = self._noted.popleft()
            if expects(name, address):
                self._noted.append((name, address))
                continue
            del self._workers[name][address]
            if not self._workers[name]:
                del self._workers[name]


class Bookings:
    """Bookings on one incarnation of a worker."""

    def __init__(self) -> None:
        self.waiting = Sums()
        """Sums over requests that have not been sent. No load report counts them."""
        self.sent = Sums()
        self.unreported = Sums()
        """Sums over requests that the worker's last load report does not count, because they had not reached it."""
        self.prefixes = Speculation()
        self.adapters = Counter[str]()
        """Open requests by the fingerprint of their adapter. Those without one are left out."""
        self._open: set[Placed] = set()
        self._unreported: dict[Placed, None] = {}
        """The requests in `unreported`, in the order in which they were sent."""

    def __contains__(self, placed: Placed) -> bool:
        return placed in self._open

    def __len__(self) -> int:
        return len(self._open)

    def add(self, placed: Placed) -> None:
        self._open.add(placed)
        self.waiting.count(placed, 1)
        if placed.adapter:
            self.adapters[placed.adapter] += 1
        self.prefixes.expect(placed.names)

    def send(self, placed: Placed) -> None:
        self.waiting.count(placed, -1)
        placed.sent = True
        self._unreported[placed] = None
        for sums in (self.sent, self.unreported):
            sums.count(placed, 1)

    def start(self, placed: Placed, *, stored_at: float) -> None:
        """Record a request's first output. From `stored_at` on, the index alone tells of the request's prefix."""
        for sums in self._sums(placed):
            sums.count_unstarted(placed, -1)
        placed.started = True
        self.prefixes.forget_at(stored_at, placed.names)

    def remove(self, placed: Placed) -> None:
        for sums in self._sums(placed):
            sums.count(placed, -1)
        self._open.remove(placed)
        self._unreported.pop(placed, None)
        if placed.adapter:
            self.adapters -= Counter((placed.adapter,))
        if not placed.started:
            self.prefixes.forget(placed.names)

    def reported(self, last_handle: int | None = None) -> None:
        """Record a load report of the worker. It counts the requests up to `last_handle`, or all if it is None."""
        while self._unreported:
            placed = next(iter(self._unreported))
            if last_handle is not None and placed.handle > last_handle:
                return
            del self._unreported[placed]
            self.unreported.count(placed, -1)

    def check_invariants(self) -> None:
        sent = {placed for placed in self._open if placed.sent}
        for sums, requests in (
            (self.waiting, self._open - sent),
            (self.sent, sent),
            (self.unreported, self._unreported.keys()),
        ):
            expected = Sums()
            for placed in requests:
                expected.count(placed, 1)
            assert sums == expected, f"booked {sums}, but {expected} is open"
        adapters = Counter(placed.adapter for placed in self._open if placed.adapter)
        assert self.adapters == adapters, f"booked {self.adapters}, but {adapters} are open"
        self.prefixes.check_invariants(placed.names for placed in self._open if not placed.started)

    def _sums(self, placed: Placed) -> list[Sums]:
        """Return the sums that include the request."""
        if not placed.sent:
            return [self.waiting]
        return [self.sent, self.unreported] if placed in self._unreported else [self.sent]


class Speculation:
    """Speculative prefixes: names of blocks that placed requests will store or have just stored.

    Each name has the number of those requests.
    """

    def __init__(self) -> None:
        self._counts: Counter[bytes] = Counter()
        self._fading: deque[tuple[float, Sequence[bytes]]] = deque()
        """Stored names, with the time at which to forget them because the index has them by then, in order of that
        time."""

    def expect(self, names: Sequence[bytes]) -> None:
        self._counts.update(names)

    def forget(self, names: Sequence[bytes]) -> None:
        for name in names:
            if self._counts[name] > 1:
                self._counts[name] -= 1
            else:
                del self._counts[name]

    def forget_at(self, time: float, names: Sequence[bytes]) -> None:
        self._fading.append((time, names))

    def depth(self, names: Sequence[bytes], now: float) -> int:
        """Return how many leading names are expected on the worker, and forget those whose time has passed.

        A request that stores block i stores all before it, so bisection is exact.
        """
        while self._fading and self._fading[0][0] <= now:
            self.forget(self._fading.popleft()[1])
        if not names or names[0] not in self._counts:
            return 0
        low, high = 1, len(names)
        while low < high:
            middle = (low + high) // 2
            if names[middle] in self._counts:
                low = middle + 1
            else:
                high = middle
        return low

    def check_invariants(self, expected: Iterable[Sequence[bytes]]) -> None:
        counts: Counter[bytes] = Counter()
        for names in expected:
            counts.update(names)
        for _, names in self._fading:
            counts.update(names)
        assert self._counts == counts, "counts of speculative names are wrong"
