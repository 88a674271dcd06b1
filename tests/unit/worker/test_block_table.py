"""BlockTable: a reader that keeps a copy and compares versions never reads stale blocks."""

import pytest
from blockyard.worker.sequences.block_table import BlockTable
from blockyard.worker.sequences.identifiers import BlockId
from hypothesis import given
from hypothesis import strategies as st


def blocks(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def test_it_reads_like_a_list_and_a_copy_is_its_own() -> None:
    table = BlockTable(blocks(3, 1, 4))
    assert (len(table), table[0], table[-1], table[1:], list(table)) == (3, 3, 4, [1, 4], [3, 1, 4])
    assert 1 in table
    assert list(reversed(table)) == [4, 1, 3]
    assert not BlockTable()
    with pytest.raises(IndexError):
        table[3]
    child = BlockTable(table)
    assert child.version is not table.version
    child.extend(blocks(4))
    assert list(table) == [3, 1, 4]


def test_only_growing_and_a_copy_of_the_last_block_keep_the_version() -> None:
    table = BlockTable(blocks(3, 1))
    version = table.version
    table.extend(blocks(4))
    table.replace(2, BlockId(9))
    assert (list(table), table.version is version) == ([3, 1, 9], True)
    for change in (
        lambda: table.replace(0, BlockId(9)),
        lambda: table.assign(blocks(9, 1, 9)),
        table.clear,
    ):
        version = table.version
        change()
        assert table.version is not version


CHANGES = st.one_of(
    st.tuples(st.just("extend"), st.lists(st.integers(0, 99), max_size=3)),
    st.tuples(st.just("assign"), st.lists(st.integers(0, 99), max_size=6)),
    st.tuples(st.just("replace"), st.lists(st.integers(0, 99), min_size=2, max_size=2)),
)


@given(st.lists(st.tuples(CHANGES, st.booleans()), max_size=40))
def test_a_copy_refreshed_from_its_last_entry_on_equals_the_table(
    changes: list[tuple[tuple[str, list[int]], bool]],
) -> None:
    """Keep the copy as execution/table_rows.py keeps its rows, which looks at the table now and then."""
    table = BlockTable(blocks(0))
    version, copy = table.version, list(table)
    for (kind, numbers), is_looked_at in changes:
        match kind:
            case "extend":
                table.extend(blocks(*numbers))
            case "assign":
                table.assign(blocks(*numbers))
            case _ if len(table):
                table.replace(numbers[0] % len(table), BlockId(numbers[1]))
        if is_looked_at:
            first = max(len(copy) - 1, 0) if version is table.version else 0
            version, copy = table.version, copy[:first] + table[first:]
            assert copy == list(table)
