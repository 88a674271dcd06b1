"""Inputs kept from step to step equal inputs built from scratch, whatever happens to the sequences."""

import random
from collections.abc import Sequence as Rows

import numpy as np
import pytest
import torch
from blockyard.kernels.attention.plan import PADDING_SLOT, AttentionPlan, plan_attention
from blockyard.worker.execution.newest_tokens import NewestTokens
from blockyard.worker.execution.step_inputs import (
    InputRows,
    Layout,
    StepInputs,
    step_inputs,
    wanted_positions,
)
from blockyard.worker.execution.table_rows import FIRST_BLOCKS, FIRST_ROWS
from blockyard.worker.scheduling.scheduler import Scheduler
from blockyard.worker.sequences.block_table import BlockTable
from blockyard.worker.sequences.identifiers import BlockId, SequenceId
from blockyard.worker.sequences.prompt_scoring import scored_positions
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import Sequence, token_array
from blockyard.worker.sequences.step_plan import ScheduledRow, StepPlan, StepTokens
from hypothesis import given
from hypothesis import strategies as st

from tests.counted_work import lines_run

from .scheduling import make_scheduler, run, submit
from .storm import Storm
from .storm_device import Device
from .weather import WEATHERS, blow

ACTIONS = 1500
CPU = torch.device("cpu")


class Inputs(InputRows):
    """Prepares inputs as a runner does."""

    def __init__(self, block_size: int = 16, *, with_items: bool = True) -> None:
        super().__init__(block_size)
        self._layout = Layout(
            block_size=block_size, num_kv_heads=2, group=2, device=CPU, with_items=with_items
        )

    def prepare(self, rows: Rows[ScheduledRow], newest: NewestTokens) -> StepInputs:
        arrays, unknown = self.arrays(rows)
        inputs = step_inputs(arrays, self._layout)
        if unknown:
            inputs.tokens_T[arrays.unknown_U] = newest.of(unknown)
        return inputs


def from_scratch(rows: tuple[ScheduledRow, ...], block_size: int) -> AttentionPlan:
    return plan_attention(
        query_lens=[row.num_tokens for row in rows],
        context_lens=[row.end for row in rows],
        block_tables=[row.sequence.block_table for row in rows],
        block_size=block_size,
        device=CPU,
        num_kv_heads=2,
        group=2,
    )


def assert_from_scratch(inputs: StepInputs, rows: tuple[ScheduledRow, ...], block_size: int) -> None:
    plan, expected = inputs.plan, from_scratch(rows, block_size)
    assert (plan.query_lens, plan.context_lens) == (expected.query_lens, expected.context_lens)
    assert torch.equal(plan.slot_mapping_T, expected.slot_mapping_T)
    assert torch.equal(plan.positions_T, expected.positions_T)
    assert torch.equal(plan.decode_items_W6, expected.decode_items_W6)
    assert torch.equal(plan.shared_items_Y5, expected.shared_items_Y5)
    for row, table_B in zip(rows, plan.block_table_RB.tolist(), strict=True):
        own = -(-row.end // block_size)
        assert table_B[:own] == row.sequence.block_table[:own]
    wanted, lasts, first = [], [], 0
    for row in rows:
        wanted += [first + position - row.start for position in (*scored_positions(row), row.end - 1)]
        lasts.append(len(wanted) - 1)
        first += row.num_tokens
    assert (inputs.wanted_Q.tolist(), list(inputs.last_R)) == (wanted, lasts)


class PreparingDevice(Device):
    """Prepares each step before it runs, as a runner does."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.block_size = scheduler.config.block_size
        self.inputs = Inputs(self.block_size)
        self.num_prepared = self.num_plain = 0
        self._newest = NewestTokens.none()

    def run(self, plan: StepPlan, *, failing_rows: frozenset[int] = frozenset()) -> StepTokens:
        self.inputs.forget(plan.ended)
        if plan.rows:
            inputs = self.inputs.prepare(plan.rows, self._newest)
            assert_from_scratch(inputs, plan.rows, self.block_size)
            tokens = [token for row in plan.rows for token in self._tokens(row)[row.start :]]
            assert inputs.tokens_T.tolist() == [max(token, 0) for token in tokens]
            self.num_prepared += 1
            self.num_plain += sum(row.is_plain for row in plan.rows)
        result = super().run(plan, failing_rows=failing_rows)
        self._newest = NewestTokens(plan.rows, torch.tensor(result.tokens, dtype=torch.int64)[:, None])
        return result


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("weather", WEATHERS)
def test_inputs_kept_over_steps_are_those_from_scratch_in_any_storm(weather: str) -> None:
    chance = random.Random(weather)
    storm = Storm(**({"max_num_seqs": 8, "max_model_len": 160} | WEATHERS[weather]))
    device = storm.device = PreparingDevice(storm.scheduler)
    for _ in range(ACTIONS):
        blow(storm, chance)
    storm.finish()
    # A storm in which nothing of it happened would prove nothing.
    assert device.num_prepared > 100
    assert device.num_plain > 100
    assert storm.scheduler.num_preemptions
    assert device.moved["copies"]
    assert len(storm.sequences) > 20
    device.inputs.forget(storm.scheduler._queues.ended())
    assert not len(device.inputs), "rows of sequences that are over are free again"


def make_row(
    number: int, blocks: list[int], *, end: int, num_tokens: int = 1, prompt_logprobs: int | None = None
) -> ScheduledRow:
    sequence = Sequence(
        sequence_id=SequenceId(number),
        tokens=token_array(range(end)),
        prompt_length=end,
        sampling=SamplingParams(prompt_logprobs=prompt_logprobs),
        names=[],
        block_table=BlockTable(map(BlockId, blocks)),
    )
    return ScheduledRow(sequence, end - num_tokens, num_tokens, samples=True)


DECODES = (make_row(0, [3, 1], end=20), make_row(1, [4], end=9))
PROMPT = make_row(2, [7], end=5, num_tokens=5)


def test_a_step_with_a_prompt_has_a_plan_of_its_wanted_positions_alone() -> None:
    rows = (*DECODES, make_row(2, [7, 5], end=30, num_tokens=19), make_row(3, [6], end=2, num_tokens=2))
    inputs = Inputs().prepare(rows, NewestTokens.none())
    plan = inputs.wanted_plan
    assert plan is not None
    assert plan.query_lens == (1, 1, 1, 1)
    assert plan.context_lens == (20, 9, 30, 2)
    assert plan.positions_T.tolist() == inputs.plan.positions_T[inputs.wanted_Q].tolist() == [19, 8, 29, 1]
    assert set(plan.slot_mapping_T.tolist()) == {PADDING_SLOT}
    assert torch.equal(plan.block_table_RB, inputs.plan.block_table_RB)


@pytest.mark.parametrize(
    ("rows", "is_there"),
    [
        (DECODES, False),
        ((*DECODES, make_row(3, [8], end=1)), False),
        ((PROMPT,), True),
        ((*DECODES, PROMPT, make_row(3, [8], end=5, num_tokens=5, prompt_logprobs=0)), False),
        ((*DECODES, make_row(3, [8], end=5, prompt_logprobs=0), PROMPT), True),
    ],
    ids=["decodes", "a prompt of one token", "a prompt", "a scored prompt", "one whose scores are over"],
)
def test_only_a_step_that_computes_what_nobody_wants_has_a_plan_without_it(
    rows: tuple[ScheduledRow, ...], is_there: bool
) -> None:
    assert (Inputs().prepare(rows, NewestTokens.none()).wanted_plan is not None) == is_there


def test_a_table_too_short_for_its_context_is_refused_whatever_lay_in_its_row_before() -> None:
    inputs = Inputs(block_size=4)
    decodes = [make_row(number, [3 * number + index for index in range(3)], end=9) for number in (0, 1)]
    inputs.prepare(decodes, NewestTokens.none())
    inputs.forget([SequenceId(1)])
    table = decodes[1].sequence.block_table
    table.assign(table[:2])
    with pytest.raises(ValueError, match="row 1: 2 blocks, 3 needed"):
        inputs.prepare(decodes, NewestTokens.none())


def test_more_sequences_and_longer_tables_than_there_was_room_for() -> None:
    inputs, num_rows, num_blocks = Inputs(), 2 * FIRST_ROWS + 1, 3 * FIRST_BLOCKS + 1
    few = (make_row(0, [3, 1], end=20), make_row(1, [4], end=9))
    assert_from_scratch(inputs.prepare(few, NewestTokens.none()), few, 16)
    tables = np.random.default_rng(0).integers(0, 9999, (num_rows, num_blocks)).tolist()
    many = tuple(make_row(2 + row, table, end=16 * num_blocks - row) for row, table in enumerate(tables))
    assert_from_scratch(inputs.prepare((*few, *many), NewestTokens.none()), (*few, *many), 16)
    assert len(inputs) == num_rows + 2


def test_an_id_that_has_come_to_mean_another_sequence_has_that_ones_table() -> None:
    inputs = Inputs()
    for blocks in ([5, 6], [7, 6]):
        rows = (make_row(3, blocks, end=18),)
        assert_from_scratch(inputs.prepare(rows, NewestTokens.none()), rows, 16)


def changed(change: str, inputs: Inputs, row: ScheduledRow) -> tuple[ScheduledRow, ...]:
    """Return the rows of the next step after something by which a plain row is not the one before."""
    match change:
        case "another place":
            return make_row(1, [4], end=9), row
        case "another version":
            row.sequence.block_table.assign(row.sequence.block_table)
        case "not plain":
            return (row._replace(is_plain=False),)
        case "forgotten":
            inputs.forget([row.sequence.sequence_id])
        case "after a step that was refused":
            with pytest.raises(ValueError, match="2 needed"):
                inputs.prepare((row, make_row(1, [4], end=20)), NewestTokens.none())
    return (row,)


@pytest.mark.parametrize(
    "change",
    ["another place", "another version", "not plain", "forgotten", "after a step that was refused"],
)
def test_of_a_plain_row_at_its_place_the_blocks_are_looked_at_no_more(change: str) -> None:
    """Seen by a change of a block that no plain row knows."""
    inputs, row = Inputs(), make_row(0, [3, 1], end=20)
    plain = row._replace(is_plain=True)
    assert_from_scratch(inputs.prepare((row,), NewestTokens.none()), (row,), 16)
    row.sequence.block_table.replace(1, BlockId(9))
    assert inputs.prepare((plain,), NewestTokens.none()).plan.block_table_RB[0, :2].tolist() == [3, 1]
    rows = changed(change, inputs, plain)
    assert_from_scratch(inputs.prepare(rows, NewestTokens.none()), rows, 16)


@given(rows=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=12))
def test_wanted_are_the_scored_first_tokens_of_each_row_and_its_last(rows: list[tuple[int, int]]) -> None:
    scored = {index: min(count, length) for index, (length, count) in enumerate(rows) if count}
    expected: list[int] = []
    lasts, start = [], 0
    for index, (length, _) in enumerate(rows):
        expected += [*range(start, start + scored.get(index, 0)), start + length - 1]
        lasts.append(len(expected) - 1)
        start += length
    wanted_Q, last_R = wanted_positions(np.array([length for length, _ in rows]), scored)
    assert wanted_Q.tolist() == expected
    assert last_R.tolist() == lasts


def test_planning_and_preparing_a_decode_takes_few_lines_and_no_more_beside_others() -> None:
    def lines(num_rows: int) -> list[int]:
        scheduler = make_scheduler(256 * 40, max_num_batched_tokens=2**18, max_model_len=640)
        for number in range(num_rows):
            submit(scheduler, number, [number] * (500 + number % 16), max_tokens=40)
        inputs, counts = Inputs(with_items=False), []
        for _ in range(12):
            plans: list[StepPlan] = []

            def step(plans: list[StepPlan] = plans) -> None:
                plans.append(scheduler.plan())
                inputs.prepare(plans[0].rows, NewestTokens.none())

            counts.append(lines_run(step))
            assert len(plans[0].rows) == num_rows
            scheduler.commit(plans[0], run(plans[0]))
        return counts[1:]

    few, many = max(lines(128)), max(lines(256))
    assert many - few <= 50 * 128
