"""Strategies of Hypothesis for placements: any snapshot that workers and networks can report, however odd."""

from typing import get_args

from blockyard.proto.index.contract import Incarnation, WorkerId
from blockyard.router.placement.config import PlacementConfig, PolicyName
from blockyard.router.placement.policies import PlacementRequest
from blockyard.router.placement.pulls import Link, PullSource
from blockyard.router.placement.scoring import Candidate
from hypothesis import strategies as st

POLICIES = get_args(PolicyName)
COUNTS = st.integers(0, 2**32)
RATES = st.one_of(st.just(0.0), st.floats())
CANDIDATE = st.builds(
    Candidate,
    address=st.uuids().map(str),
    worker_id=st.sampled_from("abc").map(WorkerId),
    cached_tokens=COUNTS,
    host_cached_tokens=COUNTS,
    queued_prefill_tokens=st.integers(0, 2**64),
    sequences=COUNTS,
    context_tokens=st.integers(0, 2**64),
    used_blocks=COUNTS,
    total_blocks=COUNTS,
    block_size=st.integers(1, 2**32),
    prefill_tokens_per_second=RATES,
    queued_pairs=st.integers(0, 2**64),
    pair_tokens=st.floats(0, 10),
    decode_step_ms=RATES | st.floats(1e300, allow_infinity=False),
    host_tokens_per_second=RATES,
    link=st.builds(
        Link,
        setup_ms=st.floats(0, 60_000),
        bytes_per_ms=RATES,
        token_bytes=st.floats(0, 2**40),
        pulling_bytes=st.integers(0, 2**64),
        step_ms=st.floats(0, 60_000),
    ),
    role=st.just("both"),
    adapter_ms=st.just(0.0) | st.floats(0, 1e12),
)
SOURCES = st.lists(
    st.builds(
        PullSource,
        worker_id=st.sampled_from("abc").map(WorkerId),
        incarnation=st.just(Incarnation("i")),
        address=st.uuids().map(str),
        transfer_address=st.just("t"),
        cached_tokens=COUNTS,
        lending_bytes=st.integers(0, 2**64),
        step_ms=st.floats(0, 60_000),
    ),
    max_size=2,
)
CANDIDATES = st.lists(CANDIDATE, min_size=1, max_size=6, unique_by=lambda candidate: candidate.address)
REQUESTS = st.builds(
    PlacementRequest,
    prompt_tokens=COUNTS,
    prefix_key=st.binary(max_size=2),
    fresh_key=st.binary(max_size=2),
    index_available=st.booleans(),
    num_placements=COUNTS,
    session_key=st.binary(max_size=2),
    session_worker=st.sampled_from([None, WorkerId("a")]),
)
CONFIGS = st.builds(
    PlacementConfig,
    decode_step_fraction=st.floats(0, 10),
    others_fraction=st.floats(0, 10),
    memory_free_fraction=st.floats(0.01, 1),
    near_equal_ms=st.floats(0, 100),
    near_equal_fraction=st.floats(0, 1),
    loaded_ms=st.floats(0, 1000),
    dynamo_overlap_score_weight=st.floats(0, 10),
    dynamo_temperature=st.one_of(st.just(0.0), st.floats(0, 10)),
)
