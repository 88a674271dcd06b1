"""Registries of adapters agree once they have the same changes, in whatever order these came."""

from random import Random

from blockyard.router.adapters.registry import AdapterRegistry, Change, RegisteredAdapter
from hypothesis import given
from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "c"])
ADAPTERS = st.builds(
    RegisteredAdapter,
    name=NAMES,
    fingerprint=st.text("0123456789abcdef", min_size=1, max_size=4),
    path=st.text(max_size=8),
    rank=st.integers(0, 64),
    num_bytes=st.integers(0, 2**40),
    tenant=st.sampled_from(["", "acme"]),
)
REVISIONS = st.integers(0, 9)
CHANGES = st.lists(
    st.builds(lambda adapter, revision: Change(adapter.name, adapter, revision), ADAPTERS, REVISIONS)
    | st.builds(lambda name, revision: Change(name, None, revision), NAMES, REVISIONS),
    max_size=8,
)


@given(CHANGES)
def test_the_changes_that_a_registry_gives_lead_to_the_same_registry(changes: list[Change]) -> None:
    one, other = AdapterRegistry(), AdapterRegistry()
    one.apply(*changes)
    other.apply(*(Change.unpacked(change.packed()) for change in one.changes()))
    assert other.missing(changes) == []
    assert one.listed() == other.listed()
    for tenant in (None, "", "acme", "other"):
        visible = one.listed(tenant)
        assert [found for found in one.listed() if one.find(found.name, tenant) is not None] == visible


@given(CHANGES, st.randoms())
def test_changes_lead_to_the_same_registry_in_any_order_and_number(changes: list[Change], random: Random):
    changes = [Change(one.name, one.adapter, revision) for revision, one in enumerate(changes)]
    mixed = [*changes, *changes]
    random.shuffle(mixed)
    one, other = AdapterRegistry(), AdapterRegistry()
    one.apply(*changes)
    other.apply(*mixed)
    assert one.changes() == other.changes()
    assert one.change("a", None).revision == other.change("a", None).revision >= len(changes)
