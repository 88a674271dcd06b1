"""Splits: when one worker begins a request and another continues it, by properties and by the terms of the cost."""

from dataclasses import replace
from math import isfinite
from random import Random
from typing import Any

import pytest
from blockyard.proto.index.contract import Incarnation, WorkerId
from blockyard.router.placement.config import PlacementConfig, PolicyName
from blockyard.router.placement.policies import Placement, PlacementRequest, place
from blockyard.router.placement.pulls import LEAST_GAIN, Link, PullSource
from blockyard.router.placement.scoring import Candidate, tie_ms
from blockyard.router.placement.splits import LONG_PROMPT_TOKENS, Beginner, able
from hypothesis import given
from hypothesis import strategies as st

from .candidates import candidate
from .placements import CANDIDATE, CANDIDATES, CONFIGS, COUNTS, POLICIES, REQUESTS, SOURCES

ROLES = st.sampled_from(["both", "prefill", "decode"])
FAST = Link(setup_ms=1.0, bytes_per_ms=1e6, token_bytes=1000.0)
CAN_PULL: dict[str, Any] = {"link": FAST, "host_tokens_per_second": 1e6}


def beginner(candidate: Candidate, tokens: int = 2**32) -> Beginner:
    source = PullSource(candidate.worker_id, Incarnation("i"), candidate.address, "t", cached_tokens=tokens)
    return Beginner(candidate._replace(role="prefill"), source)


BEGINNERS = st.lists(CANDIDATE.map(beginner), max_size=3)
MIXED = st.tuples(CANDIDATES, st.lists(ROLES, min_size=6, max_size=6)).map(
    lambda drawn: [one._replace(role=role) for one, role in zip(drawn[0], drawn[1], strict=False)]
)


@pytest.mark.parametrize("policy", POLICIES)
@given(REQUESTS, CANDIDATES, CONFIGS, SOURCES, st.booleans())
def test_without_roles_every_candidate_is_considered_and_nothing_is_split(
    policy: PolicyName,
    request_: PlacementRequest,
    candidates: list[Candidate],
    config: PlacementConfig,
    sources: list[PullSource],
    is_continued: bool,
) -> None:
    assert able(request_.prompt_tokens, candidates, is_continued=is_continued) is candidates
    continued = replace(request_, is_continued=is_continued)
    placement = place(continued, candidates, policy, Random(0), config, sources)
    assert placement == place(request_, candidates, policy, Random(0), config, sources, [])
    assert placement.split is None
    assert placement.candidates is candidates


@pytest.mark.parametrize("policy", POLICIES)
@given(REQUESTS, MIXED, CONFIGS, SOURCES, BEGINNERS)
def test_whatever_the_roles_one_worker_is_chosen_and_no_rule_is_broken_that_can_be_kept(
    policy: PolicyName,
    request_: PlacementRequest,
    candidates: list[Candidate],
    config: PlacementConfig,
    sources: list[PullSource],
    beginners: list[Beginner],
) -> None:
    placement = place(request_, candidates, policy, Random(0), config, sources, beginners)
    may_serve = able(request_.prompt_tokens, candidates, is_continued=False)
    by_address = {one.address: one for one in candidates}
    assert isfinite(placement.chosen.cost)
    if placement.split is None or not placement.split.is_chosen:
        assert by_address[placement.chosen.address] in (may_serve or candidates)
        return
    split = placement.split
    assert policy == "prefix"
    assert placement.chosen == split.prefill
    assert split.decode.pull is not None
    assert split.decode.pull.source.address == split.prefill.address
    assert by_address[split.decode.address].role != "prefill"
    if may_serve:
        assert split.local_ms is not None
        doubt_ms = max(tie_ms(split.local_ms, config), LEAST_GAIN * split.decode.pull.time_ms)
        assert split.local_ms - split.split_ms > doubt_ms


@given(COUNTS, MIXED)
def test_a_worker_that_only_decodes_may_continue_any_request_and_begin_short_ones(prompt_tokens, candidates):
    begun = able(prompt_tokens, candidates, is_continued=False)
    continued = able(prompt_tokens, candidates, is_continued=True)
    assert set(begun) <= set(continued) == {one for one in candidates if one.role != "prefill"}
    for one in set(continued) - set(begun):
        assert one.role == "decode"
        assert prompt_tokens - one.cached_tokens - one.host_cached_tokens > LONG_PROMPT_TOKENS


def placed(prompt_tokens: int, *candidates: Candidate, prefill: Candidate) -> Placement:
    request = PlacementRequest(prompt_tokens=prompt_tokens)
    return place(request, candidates, "prefix", Random(0), beginners=[beginner(prefill, prompt_tokens)])


def test_a_long_prompt_beside_many_decodes_is_split_and_one_beside_none_is_not() -> None:
    idle, busy = (candidate("d", sequences=number, **CAN_PULL) for number in (0, 50))
    assert placed(8000, busy, prefill=candidate("p")).is_split
    assert not placed(8000, idle, prefill=candidate("p")).is_split


def test_a_queue_on_the_first_worker_or_a_slow_link_keeps_a_prompt_where_it_will_decode() -> None:
    busy = candidate("d", sequences=50, **CAN_PULL)
    slow = busy._replace(link=FAST._replace(bytes_per_ms=0.1))
    assert placed(8000, busy, prefill=candidate("p")).is_split
    assert not placed(8000, busy, prefill=candidate("p", queued_prefill_tokens=100_000)).is_split
    assert not placed(8000, slow, prefill=candidate("p")).is_split


def test_nothing_is_split_where_no_worker_could_fetch_the_blocks() -> None:
    busy = candidate("d", sequences=50)
    placement = placed(8000, busy, prefill=candidate("p"))
    assert placement.split is None
    assert placement.chosen.worker_id == "d"


def test_a_worker_that_only_decodes_takes_a_long_prompt_only_where_no_other_may() -> None:
    decoding = candidate("d", **CAN_PULL)._replace(role="decode")
    other = candidate("b", queued_prefill_tokens=10_000)
    for prompt_tokens, expected in ((LONG_PROMPT_TOKENS, "d"), (LONG_PROMPT_TOKENS + 1, "b")):
        request = PlacementRequest(prompt_tokens=prompt_tokens)
        assert place(request, [decoding, other], "prefix", Random(0)).chosen.worker_id == expected
    alone = placed(8000, decoding, prefill=candidate("p", queued_prefill_tokens=100_000))
    assert alone.is_split, "the queue is long, but the rule holds"
    request = PlacementRequest(prompt_tokens=8000)
    assert place(request, [decoding], "prefix", Random(0)).chosen.worker_id == "d"


def test_the_explained_terms_add_up() -> None:
    busy = candidate("d", sequences=50, **CAN_PULL)
    split = placed(8000, busy, prefill=candidate("p", queued_prefill_tokens=100)).split
    assert split is not None
    assert split.local_ms is not None
    assert split.split_ms == split.prefill.total_ms + split.decode.total_ms < split.local_ms
    assert split.prefill.queue_ms == 100.0
    assert split.decode.pulled_tokens == 8000
    assert split.decode.uncached_tokens == 1
    assert split.decode.interference_ms < split.decode.pull_ms
    assert WorkerId("d") == split.decode.worker_id
