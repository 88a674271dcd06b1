"""Block tables as rows of one array: a sequence owns a row from its first step to its end, and a step writes what has
changed of it, which for a decode is a new block now and then.

Nothing here has to be told about forks, copies or preemptions. A list of blocks changes in place from its last block on
only: there it grows, and there a half-filled block gives way to a copy. A sequence that starts again has another list.
Of a plain row, whose list is the one that stood at its place in the step before, not even the length is looked at:
after a step of many sequences little of what they own is in the CPU's caches.

Pure bookkeeping in numpy. Shapes: R rows asked for, N rows there are, B blocks of a row.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from operator import and_, is_

import numpy as np
import numpy.typing as npt
from blockyard.worker.sequences.identifiers import BlockId, SequenceId
from blockyard.worker.sequences.sequence import Sequence

FIRST_ROWS = 64
FIRST_BLOCKS = 64


@dataclass(slots=True)
class _Row:
    number: int
    table: list[BlockId]
    """The very list that was written."""
    num_blocks: int
    last_block: BlockId


@dataclass(slots=True)
class _Gathered:
    """What the last step asked for, row by row."""

    tables: list[list[BlockId] | None] = field(default_factory=list)
    """None of a sequence that has left since."""
    places_2R: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((2, 0), dtype=np.int64))
    """Each one's row, and the blocks that are written there."""


class TableRows:
    """Rows of the sequences of one runner. Not thread-safe."""

    def __init__(self) -> None:
        self._tables_NB = np.zeros((FIRST_ROWS, FIRST_BLOCKS), dtype=np.int32)
        self._rows: dict[SequenceId, _Row] = {}
        self._free = list(range(FIRST_ROWS))
        self._last = _Gathered()

    def __len__(self) -> int:
        return len(self._rows)

    def gather(
        self,
        sequences: Items[Sequence],
        is_plain: Items[bool],
        needed_R: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int32]:
        """The blocks of each as a new array [R, the most that one needs]; what lies beyond those that a sequence needs
        means nothing. Each needs a block at least, and no two have one id. Raises ValueError where one has fewer than
        it needs: behind its own lie those of others. `is_plain` is of their rows in the step."""
        tables: list[list[BlockId] | None] = [sequence.block_table for sequence in sequences]
        last, self._last = self._last, _Gathered()
        places_2R = _widened(last.places_2R, len(tables))
        stand_as_before = map(and_, map(is_, tables, last.tables), is_plain)
        changed = [index for index, stands in enumerate(stand_as_before) if not stands]
        changed += range(len(last.tables), len(tables))
        if changed:
            known = [self._up_to_date(sequences[index]) for index in changed]
            places_2R[:, changed] = [row.number for row in known], [row.num_blocks for row in known]
        numbers_R, lengths_R = places_2R[0], places_2R[1]
        short = np.flatnonzero(lengths_R < needed_R)
        if len(short):
            row_number = int(short[0])
            raise ValueError(
                f"row {row_number}: {lengths_R[row_number]} blocks, {needed_R[row_number]} needed"
            )
        self._last = _Gathered(tables, places_2R)
        num_blocks = int(needed_R.max())
        self._widen(num_blocks)
        tables_RB: npt.NDArray[np.int32] = self._tables_NB[:, :num_blocks][numbers_R]
        return tables_RB

    def forget(self, ended: Iterable[SequenceId]) -> None:
        """Frees the rows of sequences; unknown ones do no harm."""
        freed = [row for sequence_id in ended if (row := self._rows.pop(sequence_id, None)) is not None]
        self._free += [row.number for row in freed]
        tables = {id(row.table) for row in freed}
        if tables:
            self._last.tables = [None if id(table) in tables else table for table in self._last.tables]

    def _up_to_date(self, sequence: Sequence) -> _Row:
        table = sequence.block_table
        known = self._rows.get(sequence.sequence_id)
        if (
            known is not None
            and known.table is table
            and known.num_blocks == len(table)
            and known.last_block == table[-1]
        ):
            return known
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


def _widened(places_2R: npt.NDArray[np.int64], num_rows: int) -> npt.NDArray[np.int64]:
    """The array itself where it has so many rows; else what it has of them, and zeros."""
    if places_2R.shape[1] == num_rows:
        return places_2R
    widened_2R = np.zeros((2, num_rows), dtype=np.int64)
    widened_2R[:, : places_2R.shape[1]] = places_2R[:, :num_rows]
    return widened_2R
