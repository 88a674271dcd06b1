"""Bisection of a step that raises: runs it again in halves until the failing requests stand alone.

All other requests get the tokens of a step in which nothing went wrong. Rows that depend on one another stay together:
those of one request, and those that read a block that the same step fills. Where requests raise one after the other and
none succeeds, the device is at fault, and the whole step has failed. A block that host memory has lost is no request's
fault: the step runs without the rows that read it.

Every token before a row's must be committed to its sequence. A part of a step replaces what the runner remembers of the
step before it.
"""

import logging
from collections.abc import Callable, Iterable, Set
from dataclasses import replace

from blockyard.worker.execution.runner import Runner
from blockyard.worker.memory.host_blocks import HostBlockCorrupted
from blockyard.worker.parallel.collective import RanksLost
from blockyard.worker.sequences.identifiers import BlockId, HostSlot, RequestId
from blockyard.worker.sequences.step_plan import (
    FAILED_TOKEN,
    LOST_TOKEN,
    RowExtras,
    ScheduledRow,
    StepPlan,
    StepTokens,
)

logger = logging.getLogger(__name__)
MAX_FAILED_ALONE = 3
"""After this many requests that raised alone, and no success in this step, the device is at fault."""

Group = list[int]
"""Indices of rows that stay together."""


class NothingSucceeds(Exception):
    """Every part of the step that was run has raised. `num_failed_alone` of them could not be split."""

    def __init__(self, num_failed_alone: int) -> None:
        super().__init__(f"{num_failed_alone} parts of the step failed alone")
        self.num_failed_alone = num_failed_alone


def execute(runner: Runner, plan: StepPlan, is_being_filled: Callable[[BlockId], bool]) -> StepTokens:
    """Run a step and return its tokens. Where it raises, `in_halves` runs it again. Raises NothingSucceeds."""
    try:
        return runner.execute(plan)
    except Exception as failure:
        return in_halves(runner, plan, is_being_filled, failure)


def in_halves(
    runner: Runner, plan: StepPlan, is_being_filled: Callable[[BlockId], bool], failure: Exception
) -> StepTokens:
    """Run a step in halves after it has raised `failure`, and return its tokens.

    Failing rows get FAILED_TOKEN. Rows that read a corrupted block of host memory get LOST_TOKEN. `is_being_filled`
    returns whether this step fills a block. Raises NothingSucceeds, and RanksLost where that is the failure.
    """
    if isinstance(failure, RanksLost):
        raise failure
    if isinstance(failure, HostBlockCorrupted):
        return _without(failure.slots, runner, plan, is_being_filled)
    logger.error("step %d failed with %d rows", plan.step, len(plan.rows), exc_info=failure)
    halves = _Halves(runner, plan)
    try:
        if plan.rows:
            halves.split(together(plan.rows, is_being_filled))
    except HostBlockCorrupted as found:
        return _without(found.slots, runner, plan, is_being_filled)
    if not halves.succeeded:
        raise NothingSucceeds(max(1, halves.num_failed_alone))
    return StepTokens(tokens=halves.tokens, extras=halves.extras)


def _without(
    slots: Set[HostSlot], runner: Runner, plan: StepPlan, is_being_filled: Callable[[BlockId], bool]
) -> StepTokens:
    """Run the step without these host slots and without the rows that need them, and return its tokens."""
    lost = {block for slot, block in plan.from_host if slot in slots}
    assert lost, "the step reads none of the slots"
    logger.error("step %d: host slots %s are corrupted and dropped", plan.step, sorted(slots))
    groups = together(plan.rows, is_being_filled)
    reads_lost = [
        any(lost.intersection(plan.rows[i].sequence.block_table) for i in group) for group in groups
    ]
    kept = sorted(
        index for group, reads in zip(groups, reads_lost, strict=True) if not reads for index in group
    )
    from_host = tuple(pair for pair in plan.from_host if pair[0] not in slots)
    rest = replace(plan, rows=tuple(plan.rows[index] for index in kept), from_host=from_host)
    part = execute(runner, rest, is_being_filled) if rest.has_work else StepTokens(tokens=[])
    tokens = [LOST_TOKEN] * len(plan.rows)
    for place, index in enumerate(kept):
        tokens[index] = part.tokens[place]
    extras = {kept[place]: extra for place, extra in part.extras.items()}
    return StepTokens(tokens=tokens, extras=extras, lost_slots=part.lost_slots | slots)


def together(rows: Iterable[ScheduledRow], is_being_filled: Callable[[BlockId], bool]) -> list[Group]:
    """Group rows that depend on one another, in the plan's order of their first rows."""
    groups: dict[int, Group] = {}
    group_of: dict[tuple[str, RequestId | BlockId], int] = {}
    for index, row in enumerate(rows):
        keys: list[tuple[str, RequestId | BlockId]] = [("request", row.sequence.request_id)]
        keys += [("block", block) for block in row.sequence.block_table if is_being_filled(block)]
        joined = sorted({group_of[key] for key in keys if key in group_of})
        first = joined[0] if joined else index
        merged = [member for number in joined for member in groups.pop(number)]
        groups[first] = sorted([*merged, index])
        for key, number in group_of.items():
            if number in joined:
                group_of[key] = first
        group_of.update(dict.fromkeys(keys, first))
    return [groups[number] for number in sorted(groups)]


class _Halves:
    """The parts of one step. `tokens` and `extras` hold what parts that succeeded have sampled."""

    def __init__(self, runner: Runner, plan: StepPlan) -> None:
        self.tokens = [FAILED_TOKEN] * len(plan.rows)
        self.extras: dict[int, RowExtras] = {}
        self.num_failed_alone = 0
        self.succeeded = False
        self._runner = runner
        self._plan = plan

    def split(self, groups: list[Group]) -> None:
        """Run each half of groups that raised together, and split it where it raises. A group alone has failed."""
        if len(groups) == 1:
            self.num_failed_alone += 1
            logger.error("the step fails for request %d", self._request(groups[0]))
            return
        middle = len(groups) // 2
        for half in (groups[:middle], groups[middle:]):
            if not self.succeeded and self.num_failed_alone >= MAX_FAILED_ALONE:
                return
            if not self._run(sorted(index for group in half for index in group)):
                self.split(half)

    def _run(self, indices: list[int]) -> bool:
        rows = tuple(self._plan.rows[index] for index in indices)
        try:
            part = self._runner.execute(replace(self._plan, rows=rows))
        except RanksLost:
            raise
        except HostBlockCorrupted:
            raise  # raised before any part succeeded: each part begins with its moves from host memory
        except Exception:
            return False  # the reason was logged when the whole step raised
        for place, index in enumerate(indices):
            self.tokens[index] = part.tokens[place]
            if place in part.extras:
                self.extras[index] = part.extras[place]
        self.succeeded = True
        return True

    def _request(self, group: Group) -> RequestId:
        return self._plan.rows[group[0]].sequence.request_id
