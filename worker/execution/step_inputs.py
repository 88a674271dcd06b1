"""The rows of a step as the model takes them: tokens, the plan of attention, and the positions whose output is wanted.

Owns the flattening of a step into tensors. Does not decide what runs, run it, or know what comes of it.

Shapes: T tokens in the step, R rows, Q positions whose output the step needs.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from blockyard.kernels.attention.plan import AttentionPlan, plan_rows
from blockyard.worker.execution.newest_tokens import NewestTokens
from blockyard.worker.execution.table_rows import TableRows
from blockyard.worker.memory.transfers import upload
from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.prompt_scoring import scored_positions
from blockyard.worker.sequences.sequence import Sequence as RunningSequence
from blockyard.worker.sequences.sequence import token_array
from blockyard.worker.sequences.step_plan import ScheduledRow

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Of a step with rows."""

    tokens_T: torch.Tensor
    plan: AttentionPlan
    wanted_Q: torch.Tensor
    """Indices in T: row by row the positions that score its prompt, then its last."""
    wanted_plan: AttentionPlan | None
    """Of the wanted positions alone, where there are fewer of them than tokens and it can be had."""
    last_R: tuple[int, ...]
    """Indices in Q: the last position of each row, which it samples from, or which tells whether a chunk is sound."""
    num_scored: Mapping[int, int]
    """How many positions score the prompt, by index of the row, of those that have any."""


class InputRows:
    """What is kept from step to step of the sequences of one runner. Not thread-safe."""

    def __init__(
        self, *, block_size: int, num_kv_heads: int, group: int, device: torch.device, with_items: bool
    ) -> None:
        """`with_items` says whether attention is computed in work items."""
        self._block_size = block_size
        self._num_kv_heads = num_kv_heads
        self._group = group
        self._device = device
        self._with_items = with_items
        self._tables = TableRows()

    def __len__(self) -> int:
        return len(self._tables)

    def prepare(self, rows: Sequence[ScheduledRow], newest: NewestTokens) -> StepInputs:
        """`rows` are one at least, decodes first. What the step before drew and nobody has committed is taken where it
        is: on the device."""
        sequences, starts, counts, samples, is_plain = zip(*rows, strict=True)
        is_decodes = all(samples) and sum(counts) == len(rows)
        query_R = np.ones(len(rows), dtype=np.int64) if is_decodes else np.array(counts, dtype=np.int64)
        context_R = query_R + np.array(starts, dtype=np.int64)
        plan = plan_rows(
            query_R,
            context_R,
            self._tables.gather(sequences, is_plain, -(-context_R // self._block_size)),
            block_size=self._block_size,
            device=self._device,
            num_kv_heads=self._num_kv_heads,
            group=self._group,
            with_items=self._with_items,
        )
        num_scored = {} if is_decodes else _num_scored(rows)
        wanted_Q, last_R = wanted_positions(query_R, num_scored)
        # A prefix that many decodes read once is worth more than a layer of prompts.
        has_narrow = (
            len(wanted_Q) < plan.num_query_tokens and not num_scored and not len(plan.shared_items_Y5)
        )
        tokens_T = _known_tokens(sequences, starts) if is_decodes else None
        return StepInputs(
            tokens_T=self._tokens(rows, newest) if tokens_T is None else upload(tokens_T, self._device),
            plan=plan,
            wanted_Q=upload(wanted_Q, self._device),
            wanted_plan=plan.of_last_queries() if has_narrow else None,
            last_R=tuple(last_R.tolist()),
            num_scored=num_scored,
        )

    def _tokens(self, rows: Sequence[ScheduledRow], newest: NewestTokens) -> torch.Tensor:
        tokens, unheard = _input_tokens(rows)
        tokens_T = upload(tokens, self._device)
        newest.fill_in(tokens_T, unheard)
        return tokens_T

    def forget(self, ended: Sequence[SequenceId]) -> None:
        """Sequences that have left, whether known or not."""
        self._tables.forget(ended)


def _known_tokens(sequences: Sequence[RunningSequence], starts: Sequence[int]) -> "array[int] | None":
    """One of each, unless one has not been heard of yet."""
    try:
        return token_array(
            [sequence.tokens[start] for sequence, start in zip(sequences, starts, strict=True)]
        )
    except IndexError:
        return None


def _input_tokens(
    rows: Sequence[ScheduledRow],
) -> tuple["array[int]", dict[int, tuple[SequenceId, int]]]:
    """Row by row; and by place those that stand for a token of the step before, with its sequence and position."""
    tokens = token_array()
    unheard: dict[int, tuple[SequenceId, int]] = {}
    for row in rows:
        known, start = row.sequence.tokens, row.start
        tokens += known[start : row.end]
        if len(known) < row.end:
            assert len(known) == row.end - 1, "only the last step's token may be uncommitted"
            unheard[len(tokens)] = row.sequence.sequence_id, row.end - 1
            tokens.append(0)
    return tokens, unheard


def _num_scored(rows: Sequence[ScheduledRow]) -> dict[int, int]:
    # A decode has no position before the prompt's last.
    chunks = [index for index, row in enumerate(rows) if row.num_tokens > 1 or not row.samples]
    return {index: count for index in chunks if (count := len(scored_positions(rows[index])))}


def wanted_positions(query_R: Int64Array, num_scored: Mapping[int, int]) -> tuple[Int64Array, Int64Array]:
    """Indices in T of the first tokens of rows that score them, and of each row's last; and where the latter are. Of
    shapes [Q] and [R]."""
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
