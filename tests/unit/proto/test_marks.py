"""Marks find the longest common prefix of two prompts to within one distance, in a bounded number of bytes."""

from blockyard.proto.naming.block_hash import chain
from blockyard.proto.naming.marks import (
    MARK_BYTES,
    MAX_MARKS,
    MAX_MARKS_BYTES,
    distance_between,
    marked_depths,
    marks,
    split_marks,
)
from hypothesis import given
from hypothesis import strategies as st

BLOCK_SIZES = st.sampled_from([1, 16, 32, 128, 256])


def names(shared: int, own: int, which: int) -> list[bytes]:
    start = chain(bytes(16), range(shared), 1)
    return start + chain(start[-1] if start else bytes(16), [10**6 + which] * own, 1)


@given(st.integers(0, 600), st.integers(0, 300), st.integers(0, 300), BLOCK_SIZES)
def test_a_common_prefix_is_found_to_within_one_distance(shared: int, own: int, others: int, block_size: int):
    told, asked = names(shared, own, 1), names(shared, others, 2)
    known = set(split_marks(marks(told, block_size)))
    depths = marked_depths(len(asked), block_size)
    found = next((depth for depth in depths if asked[depth - 1][:MARK_BYTES] in known), 0)
    distance = distance_between(len(told), block_size)
    assert shared - distance < found <= shared


@given(st.integers(0, 5000), BLOCK_SIZES)
def test_a_prompt_has_few_marks(num_blocks: int, block_size: int) -> None:
    packed = marks([bytes(16)] * num_blocks, block_size)
    assert len(packed) <= MAX_MARKS * MARK_BYTES
    assert bool(packed) == (num_blocks * block_size >= max(128, block_size))


@given(st.binary(max_size=100), st.sampled_from([0, 10 * MAX_MARKS_BYTES]))
def test_whatever_bytes_come_the_marks_are_whole_and_bounded(packed: bytes, padding: int) -> None:
    found = split_marks(packed + bytes(padding))
    assert all(len(mark) == MARK_BYTES for mark in found)
    assert len(found) == min((len(packed) + padding) // MARK_BYTES, MAX_MARKS_BYTES // MARK_BYTES)
