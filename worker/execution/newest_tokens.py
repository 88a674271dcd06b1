"""Newest tokens: what the last step sampled, on the device. They are the next step's inputs before the host knows them.

Shapes: S rows of the last step that sampled, N outputs a row, U tokens of the next step that the host does not know.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from blockyard.worker.memory.transfers import upload
from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.step_plan import ScheduledRow


class NewestTokens(Mapping[tuple[SequenceId, int], int]):
    """Tokens by sequence and position. Reading one as a number waits for the device; `of` does not."""

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

    def of(self, unknown: Iterable[tuple[SequenceId, int]]) -> torch.Tensor:
        """Return the tokens [U] of these sequences at these positions.

        Where the last step sampled no such token, the sequence ends at its commit. Until then any token will do as its
        input.
        """
        rows_U = upload([self._row_of[key] for key in unknown], self._tokens_SN.device)
        return self._tokens_SN[rows_U, 0].clamp_(min=0)
