"""Requests on their way to the engine are part of the reported load, without what they share with earlier prompts."""

from blockyard.proto.naming.block_hash import chain
from blockyard.proto.naming.marks import marks, split_marks
from blockyard.worker.engine_types import EngineLoad
from blockyard.worker.session.arrivals import Arrivals
from hypothesis import given
from hypothesis import strategies as st

IDLE = EngineLoad(**dict.fromkeys(EngineLoad.__dataclass_fields__, 0))
SHARED = list(range(1600))


def names(tokens: list[int]) -> list[bytes]:
    return chain(bytes(16), tokens, 16)


def test_a_prompt_counts_without_the_prefix_that_it_shares_with_an_earlier_one() -> None:
    arrivals = Arrivals(16)
    assert arrivals.add(names(SHARED), 1600) == (marks(names(SHARED), 16), 1600)
    _, tokens = arrivals.add(names([*SHARED, *range(5000, 5320)]), 1920)
    assert 320 <= tokens < 320 + 128


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 600)), max_size=20), st.data())
def test_a_withdrawn_prompt_takes_the_marks_that_no_other_has(
    prompts: list[tuple[int, int]], data: st.DataObject
) -> None:
    arrivals, left = Arrivals(16), []
    for first, length in prompts:
        packed, _ = arrivals.add(names(list(range(first, first + length))), length)
        left.append(packed)
    while left:
        gone = left.pop(data.draw(st.integers(0, len(left) - 1)))
        others = {mark for packed in left for mark in split_marks(packed)}
        expected = [mark for mark in split_marks(gone) if mark not in others]
        assert split_marks(arrivals.withdraw(gone)) == expected


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 600), st.booleans()), max_size=40))
def test_a_request_counts_until_the_engine_takes_it(prompts: list[tuple[int, int, bool]]) -> None:
    arrivals, under_way = Arrivals(16), []
    for first, length, is_taken in prompts:
        _, tokens = arrivals.add(names(list(range(first, first + length))), length)
        assert 1 <= tokens <= length
        under_way.append(tokens)
        if is_taken:
            arrivals.taken(under_way.pop(0))
        load = arrivals.added_to(IDLE)
        assert (load.waiting, load.queued_prefill_tokens) == (len(under_way), sum(under_way))
    for tokens in under_way:
        arrivals.taken(tokens)
    assert arrivals.added_to(IDLE) == IDLE
