"""Step inputs: a step's rows as the model takes them, with tokens, attention plan and the positions whose output is
wanted.

Owns the flattening of a step into tensors. Does not choose the rows, run them, or use the result.

Shapes: T tokens in the step, R rows, Q positions with an output that the step needs.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from blockyard.kernels.attention.plan import AttentionPlan, plan_rows
from blockyard.worker.execution.table_rows import TableRows
from blockyard.worker.memory.transfers import upload
from blockyard.worker.model.lora import LoraStep
from blockyard.worker.parallel.step_arrays import NONE, StepArrays
from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.prompt_scoring import scored_positions
from blockyard.worker.sequences.sequence import Sequence as RunningSequence
from blockyard.worker.sequences.sequence import token_array
from blockyard.worker.sequences.step_plan import ScheduledRow

Int64Array = npt.NDArray[np.int64]
UnknownToken = tuple[SequenceId, int]
"""A token that the host does not know yet, by sequence and position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Inputs of a step that has rows."""

    tokens_T: torch.Tensor
    plan: AttentionPlan
    wanted_Q: torch.Tensor
    """Indices in T: for each row the positions that score its prompt, then its last."""
    wanted_plan: AttentionPlan | None
    """Attention plan of the wanted positions alone. None where all tokens are wanted, or where such a plan is
    impossible or slower."""
    last_R: tuple[int, ...]
    """Indices in Q of each row's last position. The row samples from it, or it shows whether a chunk is finite."""
    num_scored: Mapping[int, int]
    """Number of positions that score the prompt, by index of the row. Rows without any are left out."""
    lora: LoraStep | None = None
    """The adapters of the step. None where every row uses the bare model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Facts on which the inputs of all steps depend."""

    block_size: int
    num_kv_heads: int
    group: int
    """Query heads a KV head."""
    device: torch.device
    with_items: bool
    """Whether attention is computed in work items."""


class InputRows:
    """Flattens the rows of one runner's steps, and keeps its sequences' block tables from step to step. Not
    thread-safe."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tables = TableRows()

    def __len__(self) -> int:
        return len(self._tables)

    def arrays(self, rows: Sequence[ScheduledRow]) -> tuple[StepArrays, tuple[UnknownToken, ...]]:
        """Return `rows`, at least one, decodes first, as arrays. Return also the tokens among them that the step before
        sampled and that are not committed yet."""
        sequences, starts, counts, samples, is_plain = zip(*rows, strict=True)
        is_decodes = all(samples) and sum(counts) == len(rows)
        query_R = np.ones(len(rows), dtype=np.int64) if is_decodes else np.array(counts, dtype=np.int64)
        context_R = query_R + np.array(starts, dtype=np.int64)
        tables_RB = self._tables.gather(sequences, is_plain, -(-context_R // self._block_size))
        tokens = _known_tokens(sequences, starts) if is_decodes else None
        unknown: dict[int, UnknownToken] = {}
        if tokens is None:
            tokens, unknown = _input_tokens(rows)
        return (
            StepArrays(
                query_R=query_R,
                context_R=context_R,
                tables_RB=tables_RB,
                tokens_T=np.array(tokens, dtype=np.int64),
                unknown_U=np.array(list(unknown), dtype=np.int64) if unknown else NONE,
                scored_R=NONE if is_decodes else _num_scored(rows),
            ),
            tuple(unknown.values()),
        )

    def forget(self, ended: Sequence[SequenceId]) -> None:
        """Drop sequences that have ended. Unknown ones are ignored."""
        self._tables.forget(ended)


def step_inputs(arrays: StepArrays, layout: Layout) -> StepInputs:
    """Return the inputs of a step that has rows. Unknown tokens are 0 in them."""
    query_R = arrays.query_R.astype(np.int64, copy=False)
    plan = plan_rows(
        query_R,
        arrays.context_R.astype(np.int64, copy=False),
        arrays.tables_RB.astype(np.int32, copy=False),
        block_size=layout.block_size,
        device=layout.device,
        num_kv_heads=layout.num_kv_heads,
        group=layout.group,
        with_items=layout.with_items,
    )
    num_scored = {index: count for index, count in enumerate(arrays.scored_R.tolist()) if count}
    wanted_Q, last_R = wanted_positions(query_R, num_scored)
    # A prefix that many decodes read once saves more than a layer of prompt positions.
    has_narrow = len(wanted_Q) < plan.num_query_tokens and not num_scored and not len(plan.shared_items_Y5)
    return StepInputs(
        tokens_T=upload(arrays.tokens_T.astype(np.int64, copy=False), layout.device),
        plan=plan,
        wanted_Q=upload(wanted_Q, layout.device),
        wanted_plan=plan.of_last_queries() if has_narrow else None,
        last_R=tuple(last_R.tolist()),
        num_scored=num_scored,
    )


def _known_tokens(sequences: Sequence[RunningSequence], starts: Sequence[int]) -> "array[int] | None":
    """Return one token of each sequence, or None where the host does not know one yet."""
    try:
        return token_array(
            [sequence.tokens[start] for sequence, start in zip(sequences, starts, strict=True)]
        )
    except IndexError:
        return None


def _input_tokens(rows: Sequence[ScheduledRow]) -> tuple["array[int]", dict[int, UnknownToken]]:
    """Return the tokens row by row, and the unknown ones by index in T, with sequence and position."""
    tokens = token_array()
    unknown: dict[int, UnknownToken] = {}
    for row in rows:
        known, start = row.sequence.tokens, row.start
        tokens += known[start : row.end]
        if len(known) < row.end:
            assert len(known) == row.end - 1, "only the last step's token may be uncommitted"
            unknown[len(tokens)] = row.sequence.sequence_id, row.end - 1
            tokens.append(0)
    return tokens, unknown


def _num_scored(rows: Sequence[ScheduledRow]) -> Int64Array:
    # A decode has no position before the prompt's last.
    counts = [len(scored_positions(row)) if row.num_tokens > 1 or not row.samples else 0 for row in rows]
    return np.array(counts if any(counts) else (), dtype=np.int64)


def wanted_positions(query_R: Int64Array, num_scored: Mapping[int, int]) -> tuple[Int64Array, Int64Array]:
    """Return the wanted positions [Q] as indices in T, and the index in Q of each row's last position [R].

    Wanted are the first tokens of rows that score them, and each row's last.
    """
    ends_R = np.cumsum(query_R)
    if not num_scored:
        return ends_R - 1, np.arange(len(query_R))
    scored_R = np.zeros_like(query_R)
    scored_R[list(num_scored)] = list(num_scored.values())
    last_R = np.cumsum(scored_R + 1) - 1
    first_R = ends_R - query_R
    wanted_Q = np.arange(last_R[-1] + 1) + np.repeat(first_R - (last_R - scored_R), scored_R + 1)
    wanted_Q[last_R] = ends_R - 1
    return wanted_Q, last_R
