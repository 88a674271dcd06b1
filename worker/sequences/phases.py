"""Phases: the parts of a request's time on this worker, for traces.

    pull -> queue -> prefill -> decode -> preempted or swapped -> prefill -> decode ...

Pure. Only requests that are traced are watched, and nothing else of the worker knows of it: a watch reads its sequence
after each step. Owns the phases and their times. Does not own how they reach a router (session/).
"""

from enum import StrEnum, auto
from typing import NamedTuple

from blockyard.worker.sequences.sequence import Sequence, SequenceState


class PhaseKind(StrEnum):
    PULL = auto()
    """It waits for blocks from another worker."""
    QUEUE = auto()
    """It waits for room."""
    PREFILL = auto()
    """It runs, and has no token since its last admission."""
    DECODE = auto()
    PREEMPTED = auto()
    """It waits after a preemption. Its blocks are computed again."""
    SWAPPED = auto()
    """It waits after a preemption. Its blocks are in host memory."""


COMPUTING = (PhaseKind.PREFILL, PhaseKind.DECODE)


class Phase(NamedTuple):
    """A phase that has ended. Times are in seconds since the request reached the worker."""

    kind: PhaseKind
    began_seconds: float
    ended_seconds: float
    steps: int
    """Steps in it that computed the sequence."""
    tokens: int
    """Tokens that they generated."""


class PhaseWatch:
    """Watch of one sequence that has just been submitted. `observe` is called after each step."""

    def __init__(self, sequence: Sequence, reached_at: float) -> None:
        """`reached_at` is when the request reached the worker, on the clock of `observe`."""
        self._sequence = sequence
        self._reached_at = self._began_at = reached_at
        self._has_run = False
        self._kind = self._waiting_kind()
        self._num_steps = self._num_tokens = 0
        self._seen = sequence.num_computed, sequence.num_generated
        """Computed positions and generated tokens at the last observation."""

    @property
    def is_over(self) -> bool:
        return self._sequence.is_over

    def observe(self, step_began_at: float, now: float) -> list[Phase]:
        """Return the phases that have ended in the last step. Sequences are admitted and preempted where it began."""
        sequence, ended = self._sequence, list[Phase]()
        computed, generated = self._seen
        self._seen = sequence.num_computed, sequence.num_generated
        has_token = sequence.num_generated > generated
        if sequence.state is SequenceState.WAITING:
            self._enter(self._waiting_kind(), step_began_at, ended)
        elif self._kind not in COMPUTING and (sequence.state is SequenceState.RUNNING or has_token):
            self._enter(PhaseKind.PREFILL, step_began_at, ended)
        if self._kind in COMPUTING:
            self._has_run = True
            self._num_steps += sequence.num_computed > computed or has_token
            self._num_tokens += sequence.num_generated - generated
        if self._kind is PhaseKind.PREFILL and has_token and not sequence.is_over:
            self._enter(PhaseKind.DECODE, now, ended)
        elif sequence.is_over:
            ended.append(self._ended(now))
        return ended

    def _enter(self, kind: PhaseKind, at: float, ended: list[Phase]) -> None:
        if kind is not self._kind:
            ended.append(self._ended(at))
            self._kind, self._began_at = kind, max(at, self._began_at)
            self._num_steps = self._num_tokens = 0

    def _ended(self, at: float) -> Phase:
        return Phase(
            kind=self._kind,
            began_seconds=self._began_at - self._reached_at,
            ended_seconds=max(at, self._began_at) - self._reached_at,
            steps=self._num_steps,
            tokens=self._num_tokens,
        )

    def _waiting_kind(self) -> PhaseKind:
        if self._sequence.is_pulling:
            return PhaseKind.PULL
        if self._sequence.swapped is not None:
            return PhaseKind.SWAPPED
        return PhaseKind.PREEMPTED if self._has_run else PhaseKind.QUEUE
