"""Sequence view: a worker's running and waiting sequences as messages, with the blocks of each.

`sequence_page` and `one_sequence` run on the engine's thread between two steps, and copy what they need. Their messages
hold no token, no text and no tenant's name.
"""

from collections.abc import Mapping
from heapq import nsmallest

from blockyard.proto.v1.cluster_pb2 import SequenceInfo, SequenceState
from blockyard.worker.engine import Engine
from blockyard.worker.sequences.identifiers import RequestId
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.sequences.sequence import SequenceState as State

MAX_TABLE_BLOCKS = 65_536
"""Maximum blocks of a shown table, which is that of one sequence: a million tokens in blocks of 16."""
STATES = {
    State.WAITING: SequenceState.SEQUENCE_STATE_WAITING,
    State.RUNNING: SequenceState.SEQUENCE_STATE_RUNNING,
}


def sequence_page(
    engine: Engine, after: int, count: int, request_ids: Mapping[RequestId, str]
) -> tuple[list[SequenceInfo], int | None]:
    """Return the first `count` running or waiting sequences with ids above `after`, and the id after which the next
    page begins.

    That id is None on the last page.
    """
    left = (sequence for sequence in _sequences(engine) if sequence.sequence_id > after)
    page = nsmallest(count + 1, left, key=lambda sequence: sequence.sequence_id)
    shown = page[:count]
    following = shown[-1].sequence_id if len(page) > count else None
    return [_message(engine, sequence, request_ids) for sequence in shown], following


def one_sequence(
    engine: Engine, sequence_id: int, request_ids: Mapping[RequestId, str]
) -> list[SequenceInfo]:
    """Return the message of one sequence with its block table, in a list that is empty once it has ended."""
    for sequence in _sequences(engine):
        if sequence.sequence_id == sequence_id:
            message = _message(engine, sequence, request_ids)
            message.block_table.extend(sequence.block_table[:MAX_TABLE_BLOCKS])
            return [message]
    return []


def _sequences(engine: Engine) -> list[Sequence]:
    return [*engine.scheduler.running, *engine.scheduler.waiting]


def _message(engine: Engine, sequence: Sequence, request_ids: Mapping[RequestId, str]) -> SequenceInfo:
    speculation = engine.scheduler.speculation
    num_drafted, num_right = (0, 0) if speculation is None else speculation.counts(sequence)
    return SequenceInfo(
        sequence_id=sequence.sequence_id,
        request_id=request_ids.get(sequence.request_id, ""),
        index=sequence.index,
        state=STATES.get(sequence.state, SequenceState.SEQUENCE_STATE_UNSPECIFIED),
        prompt_tokens=sequence.prompt_length,
        generated_tokens=sequence.num_generated,
        computed_tokens=sequence.num_computed,
        cached_tokens=sequence.cached_tokens or 0,
        preemptions=sequence.num_preemptions,
        priority=sequence.priority,
        num_blocks=len(sequence.block_table),
        drafted_tokens=num_drafted,
        accepted_tokens=num_right,
    )
