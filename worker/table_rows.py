"""Block tables as rows of one array: a sequence owns a row from its first step to its end, and a step writes what has
changed of it, which for a decode is a new block now and then.

Nothing here has to be told about forks, copies or preemptions. A list of blocks changes in place from its last block on
only: there it grows, and there a half-filled block gives way to a copy. A sequence that starts again has another list.

Pure bookkeeping in numpy. Shapes: R rows asked for, N rows there are, B blocks of a row.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blockyard.worker.sequence import BlockId, Sequence, SequenceId

FIRST_ROWS = 64
FIRST_BLOCKS = 64


@dataclass(slots=True)
class _Row:
    number: int
    table: list[BlockId]
    """The very list that was written."""
    num_blocks: int
    last_block: BlockId


class TableRows:
    """Rows of the sequences of one runner. Not thread-safe."""

    def __init__(self) -> None:
        self._tables_NB = np.zeros((FIRST_ROWS, FIRST_BLOCKS), dtype=np.int32)
        self._rows: dict[SequenceId, _Row] = {}
        self._free = list(range(FIRST_ROWS))

    def __len__(self) -> int:
        return len(self._rows)

    def gather(self, sequences: Iterable[Sequence], needed_R: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The blocks of each as a new array [R, the most that one needs]; what lies beyond those that a sequence needs
        means nothing. Each needs a block at least, and no two have one id. Raises ValueError where one has fewer than
        it needs: behind its own lie those of others."""
        numbers, lengths = [], []
        rows = self._rows
        for sequence in sequences:
            table = sequence.block_table
            row = rows.get(sequence.sequence_id)
            if (
                row is None
                or row.table is not table
                or row.num_blocks != len(table)
                or row.last_block != table[-1]
            ):
                row = self._write(sequence)
            numbers.append(row.number)
            lengths.append(row.num_blocks)
        short = np.flatnonzero(np.array(lengths) < needed_R)
        if len(short):
            row_number = int(short[0])
            raise ValueError(f"row {row_number}: {lengths[row_number]} blocks, {needed_R[row_number]} needed")
        num_blocks = int(needed_R.max())
        self._widen(num_blocks)
        return self._tables_NB[:, :num_blocks][numbers]

    def forget(self, ended: Iterable[SequenceId]) -> None:
        """Frees the rows of sequences; unknown ones do no harm."""
        for sequence_id in ended:
            row = self._rows.pop(sequence_id, None)
            if row is not None:
                self._free.append(row.number)

    def _write(self, sequence: Sequence) -> _Row:
        table = sequence.block_table
        known = self._rows.get(sequence.sequence_id)
        first = min(known.num_blocks, len(table)) - 1 if known is not None and known.table is table else 0
        number = self._take_row() if known is None else known.number
        self._widen(len(table))
        self._tables_NB[number, first : len(table)] = table[first:]
        row = _Row(number, table, len(table), table[-1])
        self._rows[sequence.sequence_id] = row
        return row

    def _take_row(self) -> int:
        if not self._free:
            num_rows = len(self._tables_NB)
            self._tables_NB = np.concatenate((self._tables_NB, np.zeros_like(self._tables_NB)))
            self._free += range(num_rows, 2 * num_rows)
        return self._free.pop()

    def _widen(self, num_blocks: int) -> None:
        missing = num_blocks - self._tables_NB.shape[1]
        if missing > 0:
            added = max(missing, self._tables_NB.shape[1])
            self._tables_NB = np.pad(self._tables_NB, ((0, 0), (0, added)))
