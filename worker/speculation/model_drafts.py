"""Model drafts: when the draft model works, and how long that takes.

Drafts of a model cost time before they are verified, unlike those that are looked up. The time of a pass is measured by
the number of sequences. To draft, the model must first have computed the prompt. That is an investment, with a credit
of its own: it is made from a part of what drafts have gained, and at first from a few steps' time.
"""

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from itertools import accumulate
from math import inf

from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.speculation.drafter import PreparedDrafter
from blockyard.worker.speculation.row_times import RowTimes

READY_LAG = 32
"""Most tokens that a sequence may lack for drafts. More are computed first, without drafts."""
CATCH_UP_TOKENS = 256
"""Most tokens that are computed so before one step."""
FIRST_CREDIT_STEPS = 16.0
"""Steps' time that may be invested before drafts have gained anything."""
MOST_CREDIT_STEPS = 128.0
INVESTED_SHARE = 0.5
"""Share of the gains that may be invested."""

logger = logging.getLogger(__name__)


class ModelDrafts:
    """Drafts of one draft model, which is left alone once it has failed. Not thread-safe."""

    def __init__(self, model: PreparedDrafter, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._clock = clock
        self._pass_times = RowTimes()
        self._credit_seconds: float | None = None
        """None before the first step was measured."""
        self._drafting_seconds = self._catch_up_seconds = 0.0
        self.has_failed = False

    def is_ready(self, sequence: Sequence) -> bool:
        """Return whether a sequence can have drafts now."""
        if self.has_failed:
            return False
        lag = self._model.lag(sequence)
        return lag is not None and lag <= READY_LAG

    def catch_up(self, sequences: Iterable[Sequence]) -> bool:
        """Compute some of the tokens that sequences lack, if there is credit. Return whether any was."""
        if self.has_failed or not self._credit_seconds or self._credit_seconds < 0:
            return False
        behind = [sequence for sequence in sequences if (self._model.lag(sequence) or 0) > READY_LAG]
        if not behind:
            return False
        began = self._clock()
        self._try(lambda: self._model.catch_up(behind, CATCH_UP_TOKENS))
        seconds = self._clock() - began
        self._catch_up_seconds += seconds
        self._credit_seconds -= seconds
        return True

    def draft(self, wanted: Items[tuple[Sequence, int]]) -> list[list[int]]:
        """Return drafts of each sequence, up to so many. None of any where the model fails."""
        found: list[list[int]] = [[] for _ in wanted]
        began = self._clock()
        self._try(lambda: found.__setitem__(slice(None), self._model.draft_all(wanted)))
        seconds = self._clock() - began
        self._drafting_seconds += seconds
        if num_passes := max(map(len, found), default=0):
            self._pass_times.observe(len(wanted), seconds / num_passes)
        return found

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception:
            self.has_failed = True
            logger.exception("the draft model has failed: no more tokens are guessed by it")

    def seconds_for(self, depths: Iterable[int], num_sequences: int) -> Callable[[int], float]:
        """Return the time to make the first so many of possible drafts. `depths` are their places, from 1 on, in the
        runs of their sequences. Before a pass was measured, more than one is taken to last for ever."""
        passes = list(accumulate(depths, max))
        seconds = self._pass_times.expected(num_sequences)
        if seconds:
            return lambda size: passes[size - 1] * seconds
        return lambda size: inf if passes[size - 1] > 1 else 0.0

    def take_seconds(self) -> tuple[float, float]:
        """Return the time since the last call in which drafts were made, and prompts computed."""
        taken = self._drafting_seconds, self._catch_up_seconds
        self._drafting_seconds = self._catch_up_seconds = 0.0
        return taken

    def earn(self, step_seconds: float, gained_seconds: float, spent_share: float) -> None:
        """Take note of a step's time, and of what its drafts have gained or lost."""
        if self._credit_seconds is None:
            self._credit_seconds = FIRST_CREDIT_STEPS * step_seconds
        earned = spent_share * step_seconds + INVESTED_SHARE * max(0.0, gained_seconds)
        self._credit_seconds = min(self._credit_seconds + earned, MOST_CREDIT_STEPS * step_seconds)

    def forget(self, ended: Iterable[SequenceId]) -> None:
        """Drop sequences that have ended. Unknown ones are ignored."""
        self._model.forget(ended)
