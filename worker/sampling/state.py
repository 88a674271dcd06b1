"""Sampling state of each sequence: its parameters as columns of one array, its token lists, its counts.

A sequence is written once, when it is first seen. After that a step is one lookup a row and one gather. Preemptions,
forks and discarded steps need no call here. A row says how many tokens come before the one to be drawn. Where the
counts do not fit that number, they are made again from the sequence's tokens.

Owns no arithmetic on logits beyond its counts.

Shapes: S rows that sample, V vocabulary.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from blockyard.worker.memory.transfers import upload
from blockyard.worker.sampling.token_counts import TokenCounts
from blockyard.worker.sequences.beams import num_candidates
from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import Sequence as RunningSequence
from blockyard.worker.sequences.step_plan import ScheduledRow

FIRST_SLOTS = 64
NO_COUNTS = -1
NO_LOGPROBS = -1

_MASK_64 = 2**64 - 1
_COLUMNS = np.dtype(
    [
        ("temperature", "f8"),
        ("top_k", "i8"),
        ("top_p", "f8"),
        ("min_p", "f8"),
        ("presence", "f8"),
        ("frequency", "f8"),
        ("repetition", "f8"),
        ("seed", "u8"),
        ("index", "i8"),
        ("prompt_length", "i8"),
        ("min_tokens", "i8"),
        ("logprobs", "i8"),
        ("num_candidates", "i8"),
        ("counts_row", "i8"),
        ("num_counted", "i8"),
        ("biases", "?"),
        ("allows", "?"),
        ("forbids", "?"),
    ]
)

Ids = npt.NDArray[np.int64]
Columns = npt.NDArray[np.void]
InFlight = Mapping[tuple[SequenceId, int], int]
"""Tokens drawn and not committed yet, by sequence and position."""


class TokenLists(NamedTuple):
    """Token ids that one sequence treats specially, limited to the vocabulary."""

    biased: Ids
    biases: npt.NDArray[np.float32]
    allowed: Ids
    bad: Ids
    ends: Ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows of one step that sample."""

    slots_S: Ids
    params_S: Columns
    """The rows' columns: `params_S["temperature"]` and so on."""
    positions_S: Ids
    """Position of the token to be drawn, counted from the start of the prompt."""
    num_outputs_S: Ids
    has_drafts_S: npt.NDArray[np.bool_]
    drafts_S: tuple[tuple[int, ...], ...]
    """Guessed tokens before each position, which the counts do not have."""

    @property
    def num_columns(self) -> int:
        """Outputs of the row that has most: N of the shapes."""
        return int(self.num_outputs_S.max(initial=1))

    @property
    def below_min_tokens_S(self) -> npt.NDArray[np.bool_]:
        num_generated_S = self.positions_S - self.params_S["prompt_length"]
        below: npt.NDArray[np.bool_] = num_generated_S < self.params_S["min_tokens"]
        return below

    def column(self, name: str, rows_X: Ids, device: torch.device) -> torch.Tensor:
        """Return one parameter of these rows on the device, [X, 1] in fp32."""
        values_X = self.params_S[name][rows_X].astype(np.float32)
        return upload(values_X, device)[:, None]


class _Slot(NamedTuple):
    number: int
    sequence: RunningSequence


class SamplingState:
    """Sampling parameters, token lists and token counts of one runner's sequences, in one slot for each.

    Not thread-safe.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.counts = TokenCounts(vocab_size, device)
        self.lists: dict[int, TokenLists] = {}
        """Keyed by slot, for sequences that have any."""
        self._vocab_size = vocab_size
        self._columns = np.zeros(0, dtype=_COLUMNS)
        self._slots: dict[SequenceId, _Slot] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def gather(self, rows: Sequence[ScheduledRow], in_flight: InFlight) -> Batch:
        """Return the batch of a step's rows. Bring the counts of rows that penalise to the state before the step."""
        slots_S = np.array([self._slot_of(row.sequence) for row in rows], dtype=np.int64)
        positions_S = np.array([row.end for row in rows], dtype=np.int64)
        params_S = self._columns[slots_S]
        drafts_S = tuple([row.drafts for row in rows])
        has_drafts_S = np.array([bool(drafts) for drafts in drafts_S])
        stale_S = (params_S["counts_row"] != NO_COUNTS) & (params_S["num_counted"] != positions_S)
        stale_S &= ~has_drafts_S
        for row in np.flatnonzero(stale_S).tolist():
            self._recount(int(params_S["counts_row"][row]), rows[row], in_flight)
        return Batch(
            slots_S=slots_S,
            params_S=params_S,
            positions_S=positions_S,
            num_outputs_S=np.array([row.num_outputs for row in rows], dtype=np.int64),
            has_drafts_S=has_drafts_S,
            drafts_S=drafts_S,
        )

    def note_drawn(self, batch: Batch, tokens_S: torch.Tensor, usable_S: torch.Tensor) -> None:
        """Count the tokens that the step has drawn in rows that penalise, although they are not committed yet.

        Those that rows of drafts give are left out: whether they count is not known.
        """
        rows_P = np.flatnonzero((batch.params_S["counts_row"] != NO_COUNTS) & ~batch.has_drafts_S)
        if not len(rows_P):
            return
        index_P = upload(rows_P, tokens_S.device)
        self.counts.add(batch.params_S["counts_row"][rows_P], tokens_S[index_P], usable_S[index_P])
        self._columns["num_counted"][batch.slots_S[rows_P]] = batch.positions_S[rows_P] + 1

    def forget(self, ended: Iterable[SequenceId]) -> None:
        """Free the slots of sequences. Unknown ones are ignored."""
        for sequence_id in ended:
            slot = self._slots.pop(sequence_id, None)
            if slot is None:
                continue
            self.lists.pop(slot.number, None)
            counts_row = int(self._columns["counts_row"][slot.number])
            if counts_row != NO_COUNTS:
                self.counts.give_back(counts_row)
            self._free.append(slot.number)

    def _slot_of(self, sequence: RunningSequence) -> int:
        slot = self._slots.get(sequence.sequence_id)
        if slot is not None and slot.sequence is sequence:
            return slot.number
        # The id now names another sequence: drop the earlier one's state.
        self.forget((sequence.sequence_id,))
        if not self._free:
            self._grow()
        slot = _Slot(self._free.pop(), sequence)
        self._slots[sequence.sequence_id] = slot
        self._write(slot.number, sequence)
        return slot.number

    def _write(self, slot: int, sequence: RunningSequence) -> None:
        sampling = sequence.sampling
        lists = _token_lists(sampling, self._vocab_size)
        if any(len(ids) for ids in lists):
            self.lists[slot] = lists
        self._columns[slot] = (
            # A beam search takes the most probable tokens, whatever the temperature.
            0.0 if sampling.beam_width else sampling.temperature,
            min(sampling.top_k, self._vocab_size) or self._vocab_size,
            sampling.top_p,
            sampling.min_p,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.repetition_penalty,
            sampling.seed & _MASK_64,
            sequence.index,
            sequence.prompt_length,
            sampling.min_tokens if len(lists.ends) else 0,
            NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs,
            min(num_candidates(sampling), self._vocab_size),
            self.counts.take_row() if sampling.penalises else NO_COUNTS,
            0,
            len(lists.biased) > 0,
            # True even if none of them is in the vocabulary: then no token is possible.
            len(sampling.allowed_token_ids) > 0,
            len(lists.bad) > 0,
        )

    def _recount(self, counts_row: int, row: ScheduledRow, in_flight: InFlight) -> None:
        sequence = row.sequence
        tokens = sequence.tokens[: row.end]
        if len(tokens) < row.end:
            tokens.append(in_flight[sequence.sequence_id, row.end - 1])
        output = tokens[sequence.prompt_length :]
        self.counts.write(counts_row, tokens[: sequence.prompt_length], output)

    def _grow(self) -> None:
        old = len(self._columns)
        added = max(FIRST_SLOTS, old)
        self._columns = np.concatenate((self._columns, np.zeros(added, dtype=_COLUMNS)))
        self._free += range(old + added - 1, old - 1, -1)


def _token_lists(sampling: SamplingParams, vocab_size: int) -> TokenLists:
    bias = [(token, value) for token, value in sampling.logit_bias if 0 <= token < vocab_size]
    return TokenLists(
        biased=np.array([token for token, _ in bias], dtype=np.int64),
        biases=np.array([value for _, value in bias], dtype=np.float32),
        allowed=_known(sampling.allowed_token_ids, vocab_size),
        bad=_known(sampling.bad_token_ids, vocab_size),
        ends=_known(sampling.eos_token_ids | sampling.stop_token_ids, vocab_size),
    )


def _known(ids: Iterable[int], vocab_size: int) -> Ids:
    # Python compares them, so that ids beyond 64 bits do not end the step either.
    return np.array(sorted(token for token in ids if 0 <= token < vocab_size), dtype=np.int64)
