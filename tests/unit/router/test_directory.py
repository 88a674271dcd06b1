"""Any content of Redis: a router trusts only its own workers, bounds their number, and drops none that answers."""

import random
from dataclasses import replace

from blockyard.proto.index.contract import DirectoryPage, Incarnation, WorkerId, WorkerRecord
from blockyard.router.cluster.directory import MAX_REPLACED, Directory
from hypothesis import given
from hypothesis import strategies as st

from .fake_worker import SECRET, signed

MAX_ADDRESSES = 8


def record(number: int) -> WorkerRecord:
    known = {"incarnation": Incarnation("1"), "fingerprint": "model", "block_size": 16}
    return signed(WorkerRecord(worker_id=WorkerId(f"w{number}"), address=f"127.0.0.1:{number}", **known))


GENUINE = [record(number) for number in range(1, 17)]
FORGED = [replace(known, address=f"203.0.113.7:{number}") for number, known in enumerate(GENUINE, start=1)]
ALIVE = {known.address for known in GENUINE[:4]}
pages = st.builds(
    DirectoryPage,
    records=st.lists(st.sampled_from(GENUINE + FORGED), max_size=12),
    next_after=st.sampled_from([0, 0, 1, 256]),
)


def directory_of(alive: set[str]) -> Directory:
    return Directory(
        secret=SECRET,
        cluster="default",
        max_addresses=MAX_ADDRESSES,
        has_failed=lambda address: address not in alive,
        rng=random.Random(7),
    )


def page_of(*records: WorkerRecord, next_after: int = 0) -> DirectoryPage:
    return DirectoryPage(records=records, next_after=next_after)


@given(st.lists(pages, max_size=20))
def test_none_but_genuine_addresses_are_believed_and_none_that_answers_is_given_up(told: list[DirectoryPage]):
    directory, believed = directory_of(ALIVE), frozenset[str]()
    for page in told:
        directory.take(page)
        assert directory.next_after == page.next_after
        assert directory.addresses <= {known.address for known in GENUINE}
        assert len(directory.addresses) <= MAX_ADDRESSES
        assert believed & ALIVE <= directory.addresses
        believed = directory.addresses


@given(st.permutations(GENUINE))
def test_old_records_beyond_the_bound_keep_no_worker_that_answers_out(shown: list[WorkerRecord]) -> None:
    """All others are of workers that have ended, written back by somebody else."""
    directory = directory_of(ALIVE)
    for _ in range(40):
        directory.take(page_of(*shown[:9], next_after=9))
        directory.take(page_of(*shown[9:]))
    assert directory.addresses >= ALIVE


def test_an_address_that_fails_is_given_up_once_a_whole_pass_does_not_show_it() -> None:
    gone, new = GENUINE[10], GENUINE[0]
    directory = directory_of(ALIVE)
    directory.take(page_of(gone))
    assert directory.addresses == {gone.address}
    directory.take(page_of(new, next_after=5))
    assert directory.addresses == {gone.address, new.address}
    directory.take(page_of())
    assert directory.addresses == {new.address}


def test_few_addresses_give_way_in_each_page() -> None:
    old, new = ([record(number) for number in range(first, first + 100)] for first in (1000, 2000))
    directory = Directory(
        secret=SECRET, cluster="default", max_addresses=100, has_failed=lambda address: True
    )
    directory.take(page_of(*old, *new, next_after=200))
    assert len(directory.addresses) == 100
    before = directory.addresses
    directory.take(page_of(*old, *new, next_after=400))
    assert len(directory.addresses & before) == 100 - MAX_REPLACED


def test_forged_records_are_counted_over_a_whole_pass() -> None:
    directory = directory_of(ALIVE)
    directory.take(page_of(*FORGED[:3], GENUINE[0], next_after=4))
    directory.take(page_of(FORGED[4]))
    assert directory.num_forged == 4
    directory.take(page_of(GENUINE[0]))
    assert directory.num_forged == 0
