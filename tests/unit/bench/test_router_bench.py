"""The router benchmark's figures from its time stamps, and a run of its parts: real workers, a real router."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from blockyard.deploy.machine.redis_server import start_private_redis
from blockyard.proto.naming.fingerprint import tokenizer_fingerprint

from bench.reporting import percentile
from bench.router.__main__ import MODEL, prompt
from bench.router.figures import added, middle, spread, throughput_shares
from bench.router.flame import entitled, shares
from bench.router.load import Delays, Receipt, delays, num_tokens_in
from bench.router.pace import Running, Stamps
from bench.router.peers import event
from bench.router.placement import PlacementTimes, placement_bench
from bench.router.processes import Workers, cpu_clock, running_workers
from bench.router.systems import (
    BEFORE,
    OURS,
    PLAINTEXT,
    SESSION,
    engine_session,
    http_worker,
    our_router,
    over_http,
)
from bench.router.trials import LoadTrial, many_streams, one_stream, request_cost
from tests.unit.router.rig import waiting_for_redis

STEP_SECONDS = 0.02
MILLISECOND = 1_000_000


def test_a_delay_has_nothing_of_the_workers_own_time() -> None:
    receipt = Receipt(7, sent=0, messages=[(50 * MILLISECOND, 1), (95 * MILLISECOND, 2)], num_tokens=3)
    emitted = [48 * MILLISECOND, 68 * MILLISECOND, 88 * MILLISECOND]
    ways = delays([receipt], {7: {"arrived": 3 * MILLISECOND, "emitted": emitted}})
    assert ways.first == [3 + 2]
    assert ways.later == [27, 7]


def test_more_tokens_than_were_emitted_are_no_result() -> None:
    receipt = Receipt(7, sent=0, messages=[(1, 1), (2, 1)], num_tokens=2)
    with pytest.raises(ValueError, match="2 tokens, but 1 were emitted"):
        delays([receipt], {7: {"arrived": 0, "emitted": [1]}})


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]


def test_a_spread_is_of_the_repeats_medians() -> None:
    row = spread([[1.0, 2.0, 3.0], [4.0, 5.0, 60.0]])
    assert row == {"p50": 3.0, "p99": 60.0, "p50_lowest": 2.0, "p50_highest": 5.0}
    assert middle([3.0, 1.0, 2.0]) == {"median": 2.0, "lowest": 1.0, "highest": 3.0}


def test_what_a_router_adds_is_its_way_less_the_one_without_it() -> None:
    ways = {way: {"p50": 1.0, "p99": 2.0} for way in ("first", "later")}
    slower = {way: {"p50": 1.5, "p99": 4.0} for way in ("first", "later")}
    figures = added({OURS: slower, SESSION: ways})
    assert figures == {OURS: {"first_p50": 0.5, "first_p99": 2.0, "later_p50": 0.5, "later_p99": 2.0}}


def load_trial(tokens_per_second: float, tokens_per_cpu_second: float) -> LoadTrial:
    return LoadTrial(
        ways=Delays(first=[1.0], later=[1.0]),
        tokens_per_second=tokens_per_second,
        tokens_per_cpu_second=tokens_per_cpu_second,
        cores=1.0,
        tokens_per_message=1.0,
        foreign_cores=0.0,
        stalls={},
    )


def test_what_tls_costs_is_told_by_pairs_of_one_moment() -> None:
    """The machine halves its speed between the pairs, which takes nothing from the ratio."""
    ours, plain = [load_trial(99, 90), load_trial(50, 45)], [load_trial(100, 100), load_trial(50, 50)]
    shares = throughput_shares({OURS: ours, PLAINTEXT: plain})
    assert shares[PLAINTEXT]["tokens_per_second"] == {"median": 0.995, "quartiles": [0.99, 1.0], "pairs": 2}
    assert shares[PLAINTEXT]["tokens_per_cpu_second"]["median"] == 0.9
    assert BEFORE not in shares


def test_a_recursive_function_counts_once_in_a_stack() -> None:
    seen = shares(["a;b;b 3", "a;c 1"])
    assert seen.own == {"b": 0.75, "c": 0.25}
    assert seen.total == {"a": 1.0, "b": 0.75, "c": 0.25}


def test_a_flame_graph_does_not_tell_where_py_spy_lies() -> None:
    picture = '<text id="title" x="1">/home/me/py-spy record</text><text id="details">x</text>'
    assert entitled(picture, "a title") == '<text id="title" x="1">a title</text><text id="details">x</text>'


def test_the_client_reads_each_token_of_the_http_workers_events() -> None:
    running = Running(3, 2, Stamps(arrived=0))
    stream = b"".join(event(running, running.next_token(now)) for now in (1, 2))
    *events, rest = stream.split(b"\n\n")
    assert (num_tokens_in(events), events[-1], rest) == (2, b"data: [DONE]", b"")


async def test_cpu_time_of_a_process_that_it_started_is_seen() -> None:
    """A shell that waits for a busy one."""
    command = "timeout --foreground 20 sh -c 'while :; do :; done'; :"
    process = await asyncio.create_subprocess_exec("sh", "-c", command, start_new_session=True)
    try:
        before = cpu_clock([process.pid])
        for _ in range(100):
            await asyncio.sleep(0.1)
            after = cpu_clock([process.pid])
            if after.measured - before.measured > 0.1:
                break
        assert 0.1 < after.measured - before.measured <= after.ours - before.ours
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def test_the_placement_path_finds_a_holder_of_the_prefix() -> None:
    times = PlacementTimes()
    with waiting_for_redis():
        async with placement_bench(seed=3) as bench:
            await bench.measure(times, calls=20)
    assert times.hits == len(times.whole) == 20
    assert all(len(part) == 20 for part in times.parts.values())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers() -> AsyncIterator[Workers]:
    fingerprint = tokenizer_fingerprint(Path(MODEL))
    async with running_workers("bench.router.workers", str(STEP_SECONDS), fingerprint) as running:
        yield running


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_a_router_process_is_measured_under_streams(workers: Workers, tmp_path: Path) -> None:
    redis = start_private_redis(tmp_path / "redis")
    try:
        async with our_router(MODEL, workers, prompt, tmp_path, redis.url) as ours:
            alone = await one_stream(ours, num_requests=2, num_tokens=3)
            trial = await many_streams(ours, num_streams=4, seconds=0.5)
            http = await many_streams(over_http(ours, prompt), num_streams=4, seconds=0.5)
            cost = await request_cost(over_http(ours, prompt), 8, 3, at_once=4, idle_seconds=0.2)
    finally:
        redis.stop()
    assert 0 < http.tokens_per_second <= 2 * 4 / STEP_SECONDS
    assert cost.whole > 0
    assert (len(alone.first), len(alone.later)) == (2, 4)
    assert min(alone.first + alone.later) > 0
    assert trial.tokens_per_second <= 2 * 4 / STEP_SECONDS
    assert trial.tokens_per_message >= 1
    assert 0 < trial.cores < 2
    assert list(trial.stalls) == ["burst", "streaming", "end"]
    assert all(0 <= stall.computing <= stall.late for stall in trial.stalls.values())


@pytest.mark.ci
@pytest.mark.asyncio(loop_scope="module")
async def test_a_worker_alone_is_measured_over_either_protocol(workers: Workers) -> None:
    session = await one_stream(engine_session(workers, range(100)), num_requests=2, num_tokens=3)
    async with running_workers("bench.router.peers", str(STEP_SECONDS)) as peers:
        http = await one_stream(http_worker(peers, prompt), num_requests=2, num_tokens=3)
    for ways in (session, http):
        assert (len(ways.first), len(ways.later)) == (2, 4)
        assert min(ways.first + ways.later) > 0
