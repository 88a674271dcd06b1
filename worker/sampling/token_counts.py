"""Token counts: which tokens a sequence has had, and the presence, frequency and repetition penalties for them.

Owns one row of two device buffers for each sequence that penalises, and no row for any other. A row is written whole
from the sequence's tokens. Then each token updates it as it is drawn, before anything is committed.

Shapes: C rows of the buffers, P sequences of a step that penalise, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from blockyard.worker.memory.transfers import upload

FIRST_ROWS = 4


class TokenCounts:
    """Counts of output tokens, and which tokens the prompt has, for some sequences."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._outputs_CV = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._prompts_CV = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._free: list[int] = []

    @property
    def num_used(self) -> int:
        return len(self._outputs_CV) - len(self._free)

    def take_row(self) -> int:
        """Return a row of undefined content."""
        if not self._free:
            self._grow()
        return self._free.pop()

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def write(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Write a row from a sequence's tokens. Ids beyond the logits are left out."""
        self._prompts_CV[row] = self._count(prompt) > 0
        self._outputs_CV[row] = self._count(output)

    def add(self, rows_P: npt.NDArray[np.int64], tokens_P: torch.Tensor, usable_P: torch.Tensor) -> None:
        """Count one more output token of each row where it is usable. Nothing is read back from the device."""
        index_P = upload(rows_P, tokens_P.device)
        self._outputs_CV.index_put_((index_P, tokens_P), usable_P.to(torch.int32), accumulate=True)

    def penalise(
        self,
        logits_PV: torch.Tensor,
        rows_P: npt.NDArray[np.int64],
        drafts_P: Sequence[Sequence[int]] = (),
        *,
        repetition_P1: torch.Tensor,
        frequency_P1: torch.Tensor,
        presence_P1: torch.Tensor,
    ) -> torch.Tensor:
        """Return logits after the three penalties. A repeated token's x becomes x / r if x > 0 and x * r otherwise.

        `drafts_P` are output tokens of each row beside those that are counted.
        """
        index_P = upload(rows_P, logits_PV.device)
        counts_PV = self._outputs_CV[index_P]
        self._add_drafts(counts_PV, drafts_P)
        in_output_PV = counts_PV > 0
        had_PV = in_output_PV | self._prompts_CV[index_P]
        repeated_PV = torch.where(logits_PV > 0, logits_PV / repetition_P1, logits_PV * repetition_P1)
        penalised_PV = torch.where(had_PV, repeated_PV, logits_PV)
        penalised_PV -= frequency_P1 * counts_PV
        penalised_PV -= presence_P1 * in_output_PV
        return penalised_PV

    def _add_drafts(self, counts_PV: torch.Tensor, drafts_P: Sequence[Sequence[int]]) -> None:
        pairs = [
            (row, token)
            for row, drafts in enumerate(drafts_P)
            for token in drafts
            if 0 <= token < self._vocab_size
        ]
        if pairs:
            row_N, token_N = upload(np.array(pairs, dtype=np.int64).T.copy(), counts_PV.device)
            counts_PV.index_put_((row_N, token_N), torch.ones_like(row_N, dtype=torch.int32), accumulate=True)

    def _count(self, tokens: Sequence[int]) -> torch.Tensor:
        vocab_size = self._outputs_CV.shape[1]
        ids = np.asarray(tokens, dtype=np.int64)
        known = ids[(ids >= 0) & (ids < vocab_size)]
        counts_V = np.bincount(known, minlength=vocab_size).astype(np.int32)
        return upload(counts_V, self._outputs_CV.device)

    def _grow(self) -> None:
        old = len(self._outputs_CV)
        added = max(FIRST_ROWS, old)
        self._outputs_CV = torch.cat((self._outputs_CV, self._outputs_CV.new_zeros(added, self._vocab_size)))
        self._prompts_CV = torch.cat((self._prompts_CV, self._prompts_CV.new_zeros(added, self._vocab_size)))
        self._free += range(old + added - 1, old - 1, -1)

    @property
    def _vocab_size(self) -> int:
        return self._outputs_CV.shape[1]
