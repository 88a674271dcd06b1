"""Drafts of a step: rows that verify guessed tokens, beside the decodes of the same sequences.

Row number i of a sequence's drafts has the first i of them as its last tokens, and gives the token after them. It reads
the keys and values that the other rows of the sequence write in the same step. A draft never preempts, and its block
has no name. What turns out wrong is overwritten, and blocks behind the last right token go back (commit.py).
"""

from collections.abc import Collection

from blockyard.worker.cache.block_tables import BlockTables
from blockyard.worker.scheduling.capacity import available_blocks
from blockyard.worker.scheduling.commit import SequenceUpdate, StepCommit, Update
from blockyard.worker.scheduling.config import SchedulerConfig
from blockyard.worker.scheduling.queues import Queues
from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.sequences.step_plan import LOST_TOKEN, RowExtras, ScheduledRow, StepPlan, StepTokens
from blockyard.worker.speculation.speculation import Speculation

_NO_EXTRAS = RowExtras()


def draft_rows(
    speculation: Speculation,
    rows: Collection[ScheduledRow],
    *,
    config: SchedulerConfig,
    queues: Queues,
    tables: BlockTables,
) -> list[ScheduledRow]:
    """Choose drafts for the decodes of a planned step, take their blocks, and return their rows.

    There are none in a step with prompts. With its drafts, a step has at most `max_num_seqs` rows, for which there is
    memory.
    """
    if not speculation.may_draft(len(rows)) or any(row.num_tokens > 1 for row in rows):
        return []
    candidates = [
        (row.sequence, _useful(row.sequence, config.max_model_len))
        for row in rows
        if _knows_all_tokens(row) and speculation.takes(row.sequence)
    ]
    most = config.max_num_seqs - len(rows)
    added: list[ScheduledRow] = []
    for sequence, tokens in speculation.propose(candidates, num_rows=len(rows), most=most):
        count = _take_blocks(sequence, len(tokens), config, queues, tables)
        drafts = tuple(tokens[:count])
        start = sequence.num_scheduled
        added += [
            ScheduledRow(sequence, start + number, 1, samples=True, drafts=drafts[: number + 1])
            for number in range(count)
        ]
        sequence.num_drafted = count
        sequence.num_in_flight += count
    return added


def is_worth_waiting(
    speculation: Speculation, running: Collection[Sequence], config: SchedulerConfig
) -> bool:
    """Return whether the next step should be planned only once the tokens in flight are known, because drafts are
    expected to gain. Only a step of decodes alone is worth that."""
    if not speculation.may_draft(len(running)):
        return False
    if any(sequence.num_samples_in_flight != 1 for sequence in running):
        return False
    candidates = [
        (sequence, _useful(sequence, config.max_model_len) - 1)
        for sequence in running
        if not sequence.num_drafted and speculation.takes(sequence)
    ]
    most = config.max_num_seqs - len(running)
    return speculation.is_worth_waiting(candidates, num_rows=len(running), most=most)


def _knows_all_tokens(row: ScheduledRow) -> bool:
    sequence = row.sequence
    return row.samples and len(sequence.tokens) == row.end and sequence.num_in_flight == 1


def _useful(sequence: Sequence, max_model_len: int) -> int:
    """Return how many drafts may give a token. The row of the newest token gives one without any."""
    left = sequence.sampling.max_tokens - sequence.num_generated
    return min(left, max_model_len - len(sequence.tokens)) - 1


def _take_blocks(
    sequence: Sequence, count: int, config: SchedulerConfig, queues: Queues, tables: BlockTables
) -> int:
    """Take the blocks of `count` drafts, and return for how many there is room."""
    start = sequence.num_scheduled
    missing = tables.missing(sequence, start + count)
    available = available_blocks(sequence, queues, tables, config.protected_blocks)
    if missing > max(available, 0):
        return min(count, len(sequence.block_table) * tables.block_size - start)
    if missing > 0:
        tables.extend(sequence, start + count)
        sequence.plain_until = 0
    return count


def commit_drafts(
    plan: StepPlan,
    step: StepTokens,
    updates: list[Update],
    step_commit: StepCommit,
    speculation: Speculation,
) -> None:
    """Apply the rows of drafts, and add the tokens that they give to the updates of their sequences.

    The other rows of the step are committed.
    """
    places = {update.sequence.sequence_id: place for place, update in enumerate(updates)}
    drafted: dict[SequenceId, tuple[Sequence, int, int]] = {}
    for index, (row, token) in enumerate(zip(plan.rows, step.tokens, strict=True)):
        if not row.drafts or token == LOST_TOKEN:
            continue
        sequence = row.sequence
        found = step_commit.commit_draft(row, token, step.extras.get(index, _NO_EXTRAS))
        _, num_drafted, num_right = drafted.get(sequence.sequence_id, (sequence, 0, 0))
        drafted[sequence.sequence_id] = sequence, num_drafted + 1, num_right + (found is not None)
        if found is not None:
            place = places[sequence.sequence_id]
            updates[place] = _joined(updates[place], found)
    for sequence, num_drafted, num_right in drafted.values():
        speculation.note(sequence, num_drafted=num_drafted, num_right=num_right)


def _joined(update: Update, found: SequenceUpdate) -> SequenceUpdate:
    assert isinstance(update, SequenceUpdate)
    return update._replace(
        drafted=(*update.drafted, *found.token_ids), logprobs=(*update.logprobs, *found.logprobs)
    )
