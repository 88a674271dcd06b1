"""Reuse odds: how probable it is that a cached block is found again soon, learned from what the pool sees.

The pool evicts the block with the lowest odds. They depend on the block's kind and on the time since its last use.
Time is counted in allocated blocks. One turnover is as many allocations as the pool has blocks.

A random sample of the blocks is watched. Each wait from the last use of such a block is counted: it ended in a reuse,
or without one. Names are remembered for a while after the eviction of their blocks, because otherwise only short waits
would be seen. The counts fade, so the odds follow a load that changes.

Until there are counts, all kinds have equal odds that fall with time. That is a plain LRU.

Odds never rise with time, and never fall from a kind to the next. Along a sequence's blocks the kind never rises and
the time never falls. So a child is always evicted before its parent.
"""

from bisect import bisect_right
from collections.abc import Hashable
from itertools import accumulate, islice
from math import expm1, log1p
from random import Random

GENERATED, COMPUTED, FOUND, FOUND_AGAIN = KINDS = range(4)
"""Kinds of blocks: with generated tokens and never found by a prompt, with prompt tokens and never found, found once,
and found more often. To be computed again soon after the eviction counts as to be found."""
AFTER_REUSE = (FOUND, FOUND, FOUND_AGAIN, FOUND_AGAIN)
"""The kind that a block of each kind becomes when a prompt finds it."""
MAX_WATCHED = 512
"""Size of the sample in a large pool. In a small one, all blocks are watched."""
NUM_AGES = 18
"""Intervals of the time since the last use: from 0, 1/32, sqrt(2)/32, 2/32, ... turnovers."""
STARTS = (0.0, *(2 ** (age / 2) / 32 for age in range(NUM_AGES)))
AGES_DOWN = range(NUM_AGES - 1, -1, -1)
SOON = 0.5
"""Turnovers within which a reuse counts."""
REFRESHES_A_TURNOVER = 4
FADING = 0.5 ** (1 / (4 * REFRESHES_A_TURNOVER))
"""Factor of old counts at each refresh. They halve in four turnovers."""
ASSUMED_WAITS = 30.0
"""Weight of the assumed odds, in counted waits."""
ASSUMED = tuple(0.3 * 0.8**age for age in range(NUM_AGES))
"""Assumed share of the waits reaching an interval that end in it by a reuse."""


def _ahead(age: int) -> tuple[int, float]:
    """Return the interval that the time SOON after the start of interval `age` lies in, and which part is past then."""
    until = STARTS[age] + SOON
    at = bisect_right(STARTS, until, hi=NUM_AGES) - 1
    start, end = STARTS[at : at + 2]
    return at, min(1.0, (until - start) / (end - start))


AHEAD = tuple(_ahead(age) for age in range(NUM_AGES))


class ReuseOdds:
    """Counts of a pool of `num_blocks` blocks, and the odds that follow from them. `now` is the pool's clock."""

    def __init__(self, num_blocks: int) -> None:
        self.now = 0
        watched = set(Random(0).sample(range(num_blocks), min(num_blocks, MAX_WATCHED)))
        self.is_watched = bytes(block in watched for block in range(num_blocks))
        """Whether each block is watched: 1 or 0."""
        self._turnover = num_blocks
        self._scale = 1024 / num_blocks**2
        self._reused = [[0.0] * NUM_AGES for _ in KINDS]
        """Waits that ended in a reuse, by kind and interval."""
        self._ended = [[0.0] * NUM_AGES for _ in KINDS]
        self.lost: dict[Hashable, int] = {}
        """Blocks that were evicted lately, by name: last use, whether it was watched (1 bit), kind (2 bits).

        The pool adds them, because a call for each would be dear. `refresh` bounds their number. The garbage collector
        skips plain numbers.
        """
        self.refresh_at = 0
        self._refreshed_at = (0, 0.0)
        self.allocations_a_second = 0.0
        """Pace of the pool's clock lately. 0 is unknown."""
        self._odds: list[list[float]] = []
        self.refresh()

    def of(self, kind: int, last_use: int) -> float:
        """Return the odds of a block of this kind that was last used at `last_use`."""
        unused = self.now - last_use
        return self._odds[kind][min(int(unused * unused * self._scale).bit_length(), NUM_AGES - 1)]

    def _age(self, last_use: int) -> int:
        unused = self.now - last_use
        return min(int(unused * unused * self._scale).bit_length(), NUM_AGES - 1)

    def reused(self, kind: int, last_use: int) -> None:
        """Count the reuse of a watched block."""
        age = self._age(last_use)
        self._reused[kind][age] += 1.0
        self._ended[kind][age] += 1.0

    def computed(self, name: Hashable) -> int:
        """Forget a lost name that is computed again, and return the kind of its block. This counts as found again."""
        lost = self.lost.pop(name)
        kind = lost & 3
        if lost & 4:
            self.reused(kind, lost >> 3)
        return AFTER_REUSE[kind]

    def refresh(self, now_seconds: float = 0.0) -> None:
        """Compute the odds from the counts, and let the counts fade. Measure the pace.

        Half as many evicted blocks are remembered as the pool has. The waits of the others ended unused.
        """
        self.refresh_at = self.now + self._turnover // REFRESHES_A_TURNOVER
        last, last_seconds = self._refreshed_at
        if now_seconds > last_seconds > 0:
            pace = (self.now - last) / (now_seconds - last_seconds)
            self.allocations_a_second = (pace + (self.allocations_a_second or pace)) / 2
        self._refreshed_at = (self.now, now_seconds)
        for name in list(islice(self.lost, max(0, len(self.lost) - self._turnover // 2))):
            lost = self.lost.pop(name)
            if lost & 4:
                self._ended[lost & 3][self._age(lost >> 3)] += 1.0
        least = [0.0] * NUM_AGES
        self._odds = []
        for reused, ended in zip(self._reused, self._ended, strict=True):
            least = [max(odds, floor) for odds, floor in zip(_odds(reused, ended), least, strict=True)]
            self._odds.append(least)
        for counts in (*self._reused, *self._ended):
            counts[:] = [count * FADING for count in counts]


def _odds(reused: list[float], ended: list[float]) -> list[float]:
    """Return the probability of a reuse within SOON, from the start of each interval on."""
    waiting, hazards = ASSUMED_WAITS, [0.0] * NUM_AGES
    for age in AGES_DOWN:
        waiting += ended[age]
        hazards[age] = -log1p(-(reused[age] + ASSUMED_WAITS * ASSUMED[age]) / waiting)
    before = [0.0, *accumulate(hazards)]
    odds, least = [0.0] * NUM_AGES, 0.0
    for age in AGES_DOWN:
        at, part = AHEAD[age]
        odds[age] = least = max(least, -expm1(before[age] - before[at] - part * hazards[at]))
    return odds
