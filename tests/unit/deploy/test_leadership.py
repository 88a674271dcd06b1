"""One control plane at a time: epochs, and what a supervisor does that cannot ask Ray's head or does not lead."""

import asyncio
import pickle
from dataclasses import dataclass, field

import pytest
from blockyard.deploy.supervision.leadership import (
    ANSWER_SECONDS,
    Claim,
    SilentHeadError,
    SupersededError,
    claim_next,
    numbers_of,
)
from blockyard.deploy.supervision.liveness import QUESTION_SECONDS
from blockyard.deploy.supervision.replicas import DEFAULT_HUNG_SECONDS
from blockyard.deploy.views.views import replica_dict
from hypothesis import given
from hypothesis import strategies as st

from simulation.virtual_time import in_virtual_time

from .incarnations import FakeIncarnations, Outlives, supervised


@dataclass
class Interleaved(Outlives):
    """A store at which others claim epochs between a list and the claim that follows it."""

    claims_between: list[int] = field(default_factory=list)
    """Epochs that others claim after each list, until these are used up."""

    def numbers(self) -> list[int]:
        listed = super().numbers()
        for _ in range(self.claims_between.pop() if self.claims_between else 0):
            self.epochs = [max(self.epochs, default=0) + 1]
        return listed


@given(st.lists(st.integers(0, 3), max_size=6))
def test_of_all_claims_the_newest_alone_holds_whoever_is_delayed(claims_between: list[int]) -> None:
    store = Interleaved(claims_between=claims_between)
    claims = [claim_next(store) for _ in range(3)]
    store.claims_between.clear()
    newest = max(store.numbers())
    for claim in claims:
        if claim.number == newest:
            claim.check()
        else:
            with pytest.raises(SupersededError):
                claim.check()
    assert len({claim.number for claim in claims}) == 3


def test_an_epoch_is_never_claimed_twice_though_old_ones_are_removed() -> None:
    assert numbers_of([b"epoch:blockyard-a:7", b"epoch:blockyard-a:12", b"wish:blockyard-a"]) == [7, 12]
    store = Outlives()
    assert [claim_next(store).number for _ in range(4)] == [1, 2, 3, 4]
    assert store.epochs == [4]
    late = Claim(store, 2)
    assert store.add(2), "a put that was delayed finds its number free"
    with pytest.raises(SupersededError):
        late.check()
    assert claim_next(store).number == 5


def test_a_silent_head_allows_nothing_and_says_so_across_processes() -> None:
    store = Outlives()
    claim = claim_next(store)
    store.is_head_silent = True
    with pytest.raises(SilentHeadError) as silence:
        claim.check()
    assert str(pickle.loads(pickle.dumps(silence.value))) == str(silence.value)
    assert str(ANSWER_SECONDS).rstrip(".0") in str(silence.value)


@supervised
async def test_a_supervisor_whose_host_is_cut_off_ends_nobody_then_or_later(
    supervisor: FakeIncarnations,
) -> None:
    worker, store = supervisor.incarnations[0], supervisor.left
    store.is_head_silent = worker.is_frozen = supervisor.router.is_frozen = True
    await asyncio.sleep(10 * DEFAULT_HUNG_SECONDS)
    store.is_head_silent = worker.is_frozen = supervisor.router.is_frozen = False
    await asyncio.sleep(10 * DEFAULT_HUNG_SECONDS)
    assert (len(supervisor.incarnations), supervisor.router.num_kills, supervisor.ended_processes) == (
        1,
        0,
        [],
    )
    assert [replica_dict(replica)["phase"] for replica in (await supervisor.report()).replicas] == [
        "serving"
    ] * 2


@supervised
async def test_who_answers_on_its_own_node_is_shown_as_silent_and_not_ended(
    supervisor: FakeIncarnations,
) -> None:
    """Only the link between the supervisor and that host is down."""
    worker = await supervisor.replica("worker")
    supervisor.incarnations[0].is_frozen = supervisor.answers_others = True
    for _ in range(5):
        await asyncio.sleep(DEFAULT_HUNG_SECONDS)
        assert (replica_dict(worker)["phase"], worker.error) == ("not answering", "")
        assert supervisor.router.sent_addresses[-1] == ["worker-0:1"], "its streams are cut"
    supervisor.incarnations[0].is_frozen = False
    await asyncio.sleep(2 * QUESTION_SECONDS)
    assert (replica_dict(worker)["phase"], len(supervisor.incarnations)) == ("serving", 1)


@in_virtual_time
async def test_a_supervisor_gives_way_to_a_newer_one_and_ends_nobody() -> None:
    left = Outlives()
    old = FakeIncarnations(left)
    await asyncio.sleep(10.0)
    claim_next(left)
    old.incarnations[0].is_frozen = True
    await asyncio.sleep(2 * QUESTION_SECONDS)
    assert old.has_given_way
    assert not old.incarnations[0].ended.is_set()
    await old.leave()


@supervised
async def test_a_restart_without_an_answer_of_the_head_changes_nothing(supervisor: FakeIncarnations) -> None:
    supervisor.left.is_head_silent = True
    with pytest.raises(SilentHeadError, match="Ray's head does not answer"):
        await supervisor.restart("worker-0", 5.0)
    assert supervisor.incarnations[0].stopped_with == []
    assert (await supervisor.replica("worker")).phase == "serving"
    supervisor.left.is_head_silent = False
    await supervisor.restart("worker-0", 5.0)
    assert len(supervisor.incarnations) == 2


@supervised
async def test_routers_hear_nothing_of_a_supervisor_that_cannot_ask_the_head(
    supervisor: FakeIncarnations,
) -> None:
    supervisor.left.is_head_silent = True
    await asyncio.sleep(2 * ANSWER_SECONDS)
    told = len(supervisor.router.sent_addresses)
    await asyncio.sleep(10 * ANSWER_SECONDS)
    assert len(supervisor.router.sent_addresses) == told
    supervisor.left.is_head_silent = False
    await asyncio.sleep(2 * ANSWER_SECONDS)
    assert len(supervisor.router.sent_addresses) > told
