"""Table rows: the block tables of sequences as rows of one array.

A sequence owns a row from its first step to its end. A step writes only what has changed, which for a decode is a new
block now and then.

Forks, copies and preemptions need no call here. Each row keeps the version of the block table that it was written from
(sequences/block_table.py). Under one version only the last known block and those behind it are written again. A plain
row (ScheduledRow.is_plain) is taken as it is where the step before had the same version at the same place. Then not
even its length is read.
After a step of many sequences, little of what they own is in the CPU's caches.

Pure bookkeeping in numpy. Shapes: R rows asked for, N rows there are, B blocks of a row.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from operator import and_, is_

import numpy as np
import numpy.typing as npt
from blockyard.kernels.attention.plan import table_width
from blockyard.worker.sequences.identifiers import BlockId, SequenceId
from blockyard.worker.sequences.sequence import Sequence

FIRST_ROWS = 64
FIRST_BLOCKS = 64


@dataclass(slots=True)
class _Row:
    number: int
    version: object
    """The version of the block table that was written."""
    num_blocks: int
    last_block: BlockId


@dataclass(slots=True)
class _Gathered:
    """The block tables that the last step asked for, one entry for each of its rows."""

    versions: list[object | None] = field(default_factory=list)
    """Versions of the block tables. None where the sequence has left since."""
    entries_2R: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((2, 0), dtype=np.int64))
    """Index of each table's row in the array, and the number of blocks written there."""


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
        """Return the blocks of each sequence as a new array, at least as wide as the most that one needs.

        Entries beyond those that a sequence needs mean nothing. Each needs at least one block, and ids are distinct.
        Raises ValueError where one has fewer than it needs: behind them lie entries of earlier sequences. `is_plain` is
        ScheduledRow.is_plain of each.
        """
        versions: list[object | None] = [sequence.block_table.version for sequence in sequences]
        last, self._last = self._last, _Gathered()
        entries_2R = _widened(last.entries_2R, len(versions))
        stand_as_before = map(and_, map(is_, versions, last.versions), is_plain)
        changed = [index for index, stands in enumerate(stand_as_before) if not stands]
        changed += range(len(last.versions), len(versions))
        if changed:
            known = [self._up_to_date(sequences[index]) for index in changed]
            entries_2R[:, changed] = [row.number for row in known], [row.num_blocks for row in known]
        numbers_R, lengths_R = entries_2R[0], entries_2R[1]
        short = np.flatnonzero(lengths_R < needed_R)
        if len(short):
            row_number = int(short[0])
            raise ValueError(
                f"row {row_number}: {lengths_R[row_number]} blocks, {needed_R[row_number]} needed"
            )
        self._last = _Gathered(versions, entries_2R)
        width = table_width(int(needed_R.max()))
        self._widen(width)
        tables_RB: npt.NDArray[np.int32] = self._tables_NB[:, :width][numbers_R]
        return tables_RB

    def forget(self, ended: Iterable[SequenceId]) -> None:
        """Free the rows of ended sequences. Unknown ones are ignored."""
        freed = [row for sequence_id in ended if (row := self._rows.pop(sequence_id, None)) is not None]
        self._free += [row.number for row in freed]
        gone = {id(row.version) for row in freed}
        if gone:
            self._last.versions = [
                None if id(version) in gone else version for version in self._last.versions
            ]

    def _up_to_date(self, sequence: Sequence) -> _Row:
        version, table = sequence.block_table.version, sequence.block_table.blocks
        known = self._rows.get(sequence.sequence_id)
        if (
            known is not None
            and known.version is version
            and known.num_blocks == len(table)
            and known.last_block == table[-1]
        ):
            return known
        first = known.num_blocks - 1 if known is not None and known.version is version else 0
        number = self._take_row() if known is None else known.number
        self._widen(len(table))
        self._tables_NB[number, first : len(table)] = table[first:]
        row = _Row(number, version, len(table), table[-1])
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


def _widened(entries_2R: npt.NDArray[np.int64], num_rows: int) -> npt.NDArray[np.int64]:
    """Return the array itself where it has `num_rows` columns, else a copy cut or padded with zeros."""
    if entries_2R.shape[1] == num_rows:
        return entries_2R
    widened_2R = np.zeros((2, num_rows), dtype=np.int64)
    widened_2R[:, : entries_2R.shape[1]] = entries_2R[:, :num_rows]
    return widened_2R
