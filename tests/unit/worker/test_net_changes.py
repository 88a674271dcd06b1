"""Net changes of a set: a reader that applies them to its copy gets the set."""

from blockyard.worker.cache.net_changes import NetChanges
from hypothesis import given
from hypothesis import strategies as st

A, B, C = b"a", b"b", b"c"


def test_a_change_cancels_its_opposite_while_both_wait() -> None:
    changes = NetChanges[bytes]()
    changes.add(A)
    changes.add(B)
    changes.remove(A)
    assert (changes.take_added(), changes.take_removed()) == ((B,), ())
    changes.remove(B)
    changes.add(B)
    assert not len(changes)


def test_names_come_in_the_order_of_their_last_change_up_to_a_limit() -> None:
    changes = NetChanges[bytes]()
    for name in (A, B, C):
        changes.add(name)
    changes.remove(A)
    changes.add(A)
    assert changes.take_added(0) == ()
    assert changes.take_added(2) == (B, C)
    assert changes.take_added(2) == (A,)
    assert changes.take_added() == ()


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.sampled_from([None, 0, 1, 9])), max_size=60))
def test_a_reader_that_applies_what_it_takes_ends_with_the_set(
    toggles: list[tuple[bytes, int | None]],
) -> None:
    changes = NetChanges[bytes]()
    held, copy = set[bytes](), set[bytes]()
    for name, limit in toggles:
        if name in held:
            held.remove(name)
            changes.remove(name)
        else:
            held.add(name)
            changes.add(name)
        for gone in changes.take_removed(limit) if limit != 9 else ():
            copy.remove(gone)
        for added in changes.take_added(limit) if limit != 9 else ():
            assert added not in copy
            copy.add(added)
    copy.difference_update(changes.take_removed())
    copy.update(changes.take_added())
    assert copy == held
