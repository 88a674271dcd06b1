"""Logit edits: what a request changes in its logits before the choice. Masks, biases, penalties, in fp32, on a copy.

The order is vLLM V1's (`Sampler.apply_logits_processors`, after the grammar's mask). Allowed tokens, bad tokens,
`min_tokens` and bias come first, then the penalties: repetition, frequency, presence. The first four commute, because
nothing that is added to minus infinity brings a token back.

Rows that change nothing keep their logits, bit for bit. Ids beyond the logits' width never reach this file.

Shapes: S rows that sample, V vocabulary, A rows with a list of allowed tokens, P rows that penalise, N list entries.
"""

from typing import Literal

import numpy as np
import torch
from blockyard.worker.memory.transfers import upload
from blockyard.worker.sampling.state import NO_COUNTS, Batch, Ids, SamplingState

IMPOSSIBLE = float("-inf")

ListName = Literal["biased", "allowed", "bad", "ends"]
"""Names of the fields of TokenLists."""

_NONE: Ids = np.zeros(0, dtype=np.int64)


def has_edits(batch: Batch) -> bool:
    params_S = batch.params_S
    listed_S = params_S["biases"] | params_S["allows"] | params_S["forbids"] | batch.below_min_tokens_S
    return bool((listed_S | (params_S["counts_row"] != NO_COUNTS)).any())


def edit(logits_SV: torch.Tensor, batch: Batch, state: SamplingState) -> None:
    """Apply the edits that the requests ask for, in place. The logits are contiguous."""
    params_S = batch.params_S
    _restrict(logits_SV, np.flatnonzero(params_S["allows"]), batch, state)
    _forbid(logits_SV, np.flatnonzero(params_S["forbids"]), "bad", batch, state)
    _forbid(logits_SV, np.flatnonzero(batch.below_min_tokens_S), "ends", batch, state)
    _add_biases(logits_SV, np.flatnonzero(params_S["biases"]), batch, state)
    _penalise(logits_SV, np.flatnonzero(params_S["counts_row"] != NO_COUNTS), batch, state)


def _restrict(logits_SV: torch.Tensor, rows_A: Ids, batch: Batch, state: SamplingState) -> None:
    if not len(rows_A):
        return
    index_N = _entries(rows_A, "allowed", batch, state, logits_SV)
    allowed_N = logits_SV.view(-1)[index_N]
    logits_SV.index_fill_(0, upload(rows_A, logits_SV.device), IMPOSSIBLE)
    logits_SV.view(-1).index_copy_(0, index_N, allowed_N)


def _forbid(logits_SV: torch.Tensor, rows: Ids, kind: ListName, batch: Batch, state: SamplingState) -> None:
    # An assignment of a number, `logits[index] = x`, would copy it to the device and wait for that.
    if len(rows):
        logits_SV.view(-1).index_fill_(0, _entries(rows, kind, batch, state, logits_SV), IMPOSSIBLE)


def _add_biases(logits_SV: torch.Tensor, rows: Ids, batch: Batch, state: SamplingState) -> None:
    if not len(rows):
        return
    index_N = _entries(rows, "biased", batch, state, logits_SV)
    biases_N = np.concatenate([state.lists[slot].biases for slot in batch.slots_S[rows].tolist()])
    logits_SV.view(-1).index_put_((index_N,), upload(biases_N, logits_SV.device), accumulate=True)


def _penalise(logits_SV: torch.Tensor, rows_P: Ids, batch: Batch, state: SamplingState) -> None:
    if not len(rows_P):
        return
    device = logits_SV.device
    index_P = upload(rows_P, device)
    logits_SV[index_P] = state.counts.penalise(
        logits_SV[index_P],
        batch.params_S["counts_row"][rows_P],
        [batch.drafts_S[row] for row in rows_P.tolist()],
        repetition_P1=batch.column("repetition", rows_P, device),
        frequency_P1=batch.column("frequency", rows_P, device),
        presence_P1=batch.column("presence", rows_P, device),
    )


def _entries(
    rows: Ids, kind: ListName, batch: Batch, state: SamplingState, logits_SV: torch.Tensor
) -> torch.Tensor:
    """Return the index in the flat logits of every entry in the lists of some rows."""
    slots = batch.slots_S[rows].tolist()
    lists = [getattr(state.lists[slot], kind) if slot in state.lists else _NONE for slot in slots]
    rows_N = np.repeat(rows, [len(ids) for ids in lists])
    return upload(rows_N * logits_SV.shape[1] + np.concatenate([_NONE, *lists]), logits_SV.device)
