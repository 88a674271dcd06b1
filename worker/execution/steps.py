"""Steps of an engine: one at a time, or each planned and started while the one before it is computed.

    one at a time    plan n, run n, commit n; plan n+1, ...
    overlapping      plan n+1, start n+1, wait for n, commit n; plan n+2, start n+2, wait for n+1, ...

With overlap, a device that computes by itself never waits for the host. Tokens go from one step into the next on the
device. What a commit decides (an end, a failure) takes effect one step late, and what was computed too much is dropped.
A step that waits for the host (scheduling/overlap.py) always runs by itself. Where guessed tokens are expected to gain,
step n is committed before step n+1 is planned, because guesses need all tokens.

Where a row of step n fails, step n+1 may have been computed from garbage. It is taken back, and its sequences continue
from the state after step n. Owns the step in flight. Does not choose what runs (the scheduler).
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from blockyard.worker.execution.bisect import NothingSucceeds, execute, in_halves
from blockyard.worker.execution.runner import PendingStep, Runner, StartingRunner
from blockyard.worker.scheduling.commit import Update
from blockyard.worker.scheduling.overlap import may_be_in_flight
from blockyard.worker.scheduling.scheduler import Scheduler
from blockyard.worker.sequences.step_plan import FAILED_TOKEN, StepPlan, StepTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedStep:
    """A step that was committed, or of which nothing succeeded."""

    plan: StepPlan
    updates: list[Update]
    seconds: float
    """Seconds in which the device worked on this step alone."""
    num_failed_alone: int = 0
    """Parts of the step that could not be split and raised, where nothing succeeded. 0 where anything did."""
    waited_seconds: float = 0.0
    """Seconds before it in which it was planned and no step was computed."""
    wasted_seconds: float = 0.0
    """The part of it that overlap would have saved, where the step waited for tokens and then verified no draft."""
    is_disturbed: bool = False
    """Whether a row failed or the step was run again. What a later step computed on top of it does not count."""
    adapter_seconds: Mapping[str, float] = field(default_factory=dict)
    """Time of each adapter that the step has loaded, by fingerprint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    plan: StepPlan
    started_at: float
    pending: PendingStep | Exception
    waited_seconds: float
    wasted_seconds: float

    @property
    def has_begun(self) -> bool:
        return not isinstance(self.pending, Exception)

    def result(self) -> StepTokens:
        if isinstance(self.pending, Exception):
            raise self.pending
        return self.pending.result()


class Steps:
    """The steps of one scheduler on one runner. Not thread-safe."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        overlap: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ValueError for `overlap` on a runner that runs each step to its end."""
        self._scheduler = scheduler
        self._runner = runner
        self._starting = runner if isinstance(runner, StartingRunner) else None
        if overlap and self._starting is None:
            raise ValueError(f"steps of {type(runner).__name__} cannot overlap")
        self.overlap = overlap
        """May change between calls of `advance`."""
        self._clock = clock
        self._in_flight: _InFlight | None = None
        self._last_end = clock()

    @property
    def is_any_in_flight(self) -> bool:
        return self._in_flight is not None

    def advance(self) -> Iterator[EndedStep]:
        """Plan a step and start or run it, and yield the steps that have ended, first the one that was in flight.

        Exhaust the iterator: a step is committed only after the results of the one before it were taken.
        """
        before, self._in_flight = self._in_flight, None
        waits = before is not None and self._scheduler.waits_for_tokens()
        if before is not None and waits:
            yield self._end(before)
            before = None
        began = self._clock()
        plan = self._scheduler.plan()
        waited = self._clock() - began if before is None else 0.0
        wasted = waited if waits and not plan.num_drafts else 0.0
        starts = self.overlap and plan.has_work and may_be_in_flight(plan)
        started = self._start(plan, waited, wasted) if starts else None
        has_begun = started is not None and started.has_begun
        if before is not None:
            ended = self._end(before)
            yield ended
            if ended.is_disturbed and plan.has_work:
                self._scheduler.abandon(plan, moved=has_begun)
                return
        if has_begun:
            self._in_flight = started
        elif started is not None:
            yield self._end(started)
        elif plan.has_work:
            yield replace(self._run(plan), waited_seconds=waited, wasted_seconds=wasted)

    def _run(self, plan: StepPlan) -> EndedStep:
        started_at = self._clock()
        return self._commit(
            plan, started_at, lambda: execute(self._runner, plan, self._scheduler.cache.is_unconfirmed)
        )

    def _start(self, plan: StepPlan, waited_seconds: float, wasted_seconds: float) -> _InFlight:
        started_at = self._clock()
        pending: PendingStep | Exception
        assert self._starting is not None
        try:
            pending = self._starting.start(plan)
        except Exception as failure:
            pending = failure
        return _InFlight(
            plan=plan,
            started_at=started_at,
            pending=pending,
            waited_seconds=waited_seconds,
            wasted_seconds=wasted_seconds,
        )

    def _end(self, step: _InFlight) -> EndedStep:
        """Wait for a step and commit it, run again in halves where it raised. Every step before it is committed."""
        began = max(step.started_at, self._last_end)
        try:
            tokens = step.result()
        except Exception as failure:
            is_being_filled = self._scheduler.cache.is_unconfirmed
            run = partial(in_halves, self._runner, step.plan, is_being_filled, failure)
            return self._commit(step.plan, began, run, is_disturbed=True)
        ended = self._commit(step.plan, began, lambda: tokens)
        return replace(ended, waited_seconds=step.waited_seconds, wasted_seconds=step.wasted_seconds)

    def _commit(
        self,
        plan: StepPlan,
        started_at: float,
        run: Callable[[], StepTokens],
        *,
        is_disturbed: bool = False,
    ) -> EndedStep:
        adapter_seconds: Mapping[str, float] = {}
        try:
            tokens = run()
        except NothingSucceeds as failure:
            updates, num_failed_alone, is_disturbed = (
                self._scheduler.fail(plan),
                failure.num_failed_alone,
                True,
            )
        else:
            updates, num_failed_alone = self._scheduler.commit(plan, tokens), 0
            is_disturbed = is_disturbed or FAILED_TOKEN in tokens.tokens
            adapter_seconds = tokens.adapter_seconds
        self._last_end = self._clock()
        return EndedStep(
            plan=plan,
            updates=updates,
            seconds=self._last_end - started_at,
            num_failed_alone=num_failed_alone,
            is_disturbed=is_disturbed,
            adapter_seconds=adapter_seconds,
        )
