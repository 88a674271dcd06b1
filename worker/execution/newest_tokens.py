"""Newest tokens: what the last step sampled, on the device. They are the next step's inputs before the host knows them.

Shapes: S rows of the last step that sampled, N outputs a row, T tokens of the next step, U of them that the host does
not know.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from blockyard.worker.memory.transfers import upload
from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.step_plan import ScheduledRow


class NewestTokens(Mapping[tuple[SequenceId, int], int]):
    """Tokens by sequence and position. Reading one as a number waits for the device; `fill_in` does not."""

    def __init__(self, rows: Sequence[ScheduledRow], tokens_SN: torch.Tensor) -> None:
        self._row_of = {(row.sequence.sequence_id, row.end): index for index, row in enumerate(rows)}
        self._tokens_SN = tokens_SN

    @classmethod
    def none(cls) -> "NewestTokens":
        return cls((), torch.empty(0, 1, dtype=torch.int64))

    def __getitem__(self, key: tuple[SequenceId, int]) -> int:
        return int(self._tokens_SN[self._row_of[key], 0])

    def __iter__(self) -> Iterator[tuple[SequenceId, int]]:
        return iter(self._row_of)

    def __len__(self) -> int:
        return len(self._row_of)

    def fill_in(self, tokens_T: torch.Tensor, unknown: Mapping[int, tuple[SequenceId, int]]) -> None:
        """Write the unknown tokens into `tokens_T`. `unknown` gives sequence and position by index in T.

        Where the last step sampled no such token, the sequence ends at its commit. Until then any token will do as its
        input.
        """
        if not unknown:
            return
        offsets_U = upload(list(unknown), tokens_T.device)
        rows_U = upload([self._row_of[key] for key in unknown.values()], tokens_T.device)
        tokens_T.index_copy_(0, offsets_U, self._tokens_SN[rows_U, 0].clamp_(min=0))
