"""More work than fits: bursts, floods, a pool that is too small. Limits hold exactly, and no request starves."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest
from blockyard.router.client import AsyncClient

from tests.system.load import Stream, answers, load, streams, until
from tests.system.processes import DETERMINISTIC, SIMULATED, Processes, processes

from .invariants import Baseline, all_is_as_before, each_ended_once, pool_of, same_tokens
from .rig import whole

MAX_REQUESTS = 50
MAX_ALONE = MAX_REQUESTS - MAX_REQUESTS // 16
"""Requests that a single client may hold. The rest is kept for other clients."""
BURST = 500
BURST_TOKENS = 600
"""Tokens per request, so that none ends before the last has arrived."""
MAX_TOKENS_ADMITTED = 6000
STEP = ("--simulated-step-seconds", "0.01", "--simulated-prefill-tokens-per-second", "20000")
BLOCK_BYTES = 49_152
"""Block size of the demo model in fp32."""
REFUSED_SECONDS = 30.0
"""Bound on a refusal in a burst of 500, whose clients share two cores with the router. Alone, each takes at most 50
ms."""
LEAST_GOODPUT = 0.4
"""Least share of the goodput without the burst. The design requires 0.9. The test's 500 clients take one of the two
cores, and other programs may take more."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    limits = ("--max-requests", str(MAX_REQUESTS), "--max-tokens-admitted", str(MAX_TOKENS_ADMITTED))
    with processes(tmp_path_factory.mktemp("limits")) as cluster:
        workers = [cluster.add_worker(f"w{number}", *SIMULATED, *STEP) for number in range(2)]
        addresses = [worker.address for worker in workers]
        cluster.start(*workers, cluster.add_router("r0", *limits, workers=addresses))
        yield cluster


@pytest.mark.fault(10)
async def test_of_a_burst_exactly_the_limit_is_let_in(cluster: Processes, measured: dict[str, Any]) -> None:
    async with whole(cluster) as client:
        reference = await answers(client, streams(MAX_ALONE, max_tokens=BURST_TOKENS))
        baseline = Baseline.of(cluster)
        finished = await answers(client, streams(BURST, max_tokens=BURST_TOKENS))
        accepted = [stream for stream in finished if stream.error is None]
        refused = [stream for stream in finished if stream.error is not None]
        slowest = max(stream.ended - stream.started for stream in refused if stream.ended is not None)
        goodput, p99 = _seconds(reference) / _seconds(accepted), _p99(accepted) / _p99(reference)
        note = f"the last of {len(refused)} heard after {slowest:.2f} s; of those let in, goodput {goodput:.0%} and "
        measured.update(
            failed=0, migrated=0, note=f"{note}99th percentile {p99:.2f} times that without the burst"
        )
        assert len(accepted) == MAX_ALONE
        assert {(stream.code, stream.reason) for stream in refused} == {
            (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        }
        assert all(stream.error.retry_delay_seconds for stream in refused if stream.error is not None)
        assert slowest < REFUSED_SECONDS
        assert goodput > LEAST_GOODPUT
        assert p99 < 1 / LEAST_GOODPUT
        # A crowded machine may admit requests other than the first ones.
        pairs = [
            (stream, alone) for stream, alone in zip(finished, reference, strict=False) if not stream.error
        ]
        assert len(pairs) > MAX_ALONE / 2
        same_tokens([stream for stream, _ in pairs], [alone for _, alone in pairs])
        each_ended_once(finished)
        await all_is_as_before(cluster, baseline, client)


def _seconds(finished: Sequence[Stream]) -> float:
    """Return the time from the first beginning to the last end. All streams have the same number of tokens."""
    return max(_ends(finished)) - min(stream.started for stream in finished)


def _p99(finished: Sequence[Stream]) -> float:
    took = sorted(end - stream.started for stream, end in zip(finished, _ends(finished), strict=True))
    return took[len(took) * 99 // 100]


def _ends(finished: Sequence[Stream]) -> list[float]:
    return [stream.ended for stream in finished if stream.ended is not None]


@pytest.mark.fault(11)
async def test_long_prompts_meet_the_limit_on_tokens_and_short_ones_go_on(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    async with whole(cluster) as client:
        alone = await _time_to_first_token(client)
        flood = [
            Stream(
                request_id=f"long-{number}-{time.monotonic_ns()}",
                prompt=f"{number} " + "word " * 1500,
                arguments={"max_tokens": 200, "ignore_eos": True},
            )
            for number in range(10)
        ]
        async with load(client, flood) as running:
            await asyncio.sleep(0.2)
            beside = await _time_to_first_token(client)
            await running.finished()
        refused = [stream for stream in flood if stream.error is not None]
        measured.update(
            failed=0, note=f"first token of short ones {1e3 * alone:.0f} -> {1e3 * beside:.0f} ms"
        )
        assert 0 < len(refused) < len(flood)
        assert {stream.reason for stream in refused} == {"OVERLOADED"}
        assert beside < alone + 2.0
        each_ended_once(flood)


@pytest.mark.fault(12)
async def test_a_tenant_that_floods_does_not_hold_up_another(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    async with whole(cluster) as client:
        alone = await _time_to_first_token(client)
        router = cluster.routers["r0"]
        async with (
            AsyncClient(router.address, retries=0, tenant="flood") as flooder,
            AsyncClient(router.address, retries=0, tenant="quiet") as quiet,
            # An absent tenant has no share: others may take everything before it arrives.
            load(quiet, streams(1, prefix="quiet", max_tokens=1500)) as there,
        ):
            await there.until_tokens(1)
            async with load(flooder, streams(100, prefix="flood", max_tokens=300)) as flood:
                await until(lambda: sum(s.ended is not None for s in flood.streams) >= 25, "some are refused")
                beside = await _time_to_first_token(quiet)
        measured.update(failed=0, note=f"first token {1e3 * alone:.0f} -> {1e3 * beside:.0f} ms")
        assert beside < alone + 2.0


async def _time_to_first_token(client: AsyncClient) -> float:
    """Return the mean of a few requests, one after another. All must be admitted."""
    times = []
    for stream in streams(5, prefix="short", max_tokens=2):
        await answers(client, [stream])
        assert stream.error is None, stream.error
        times.append(stream.arrivals[0] - stream.started)
    return sum(times) / len(times)


@pytest.mark.fault(14)
async def test_what_can_never_fit_is_told_at_once_and_holds_nobody_up(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    """The pool has 384 blocks. 16 beams of 1,000 tokens, which must fit at the same time, need a thousand."""
    async with whole(cluster) as client:
        reference = await answers(client, streams(4))
        async with load(client, streams(4)) as running:
            await running.until_tokens(1)
            (huge,) = await answers(client, streams(1, prefix="huge", max_tokens=1000, beam_width=16))
            finished = await running.finished()
        assert huge.ended is not None
        took = huge.ended - huge.started
        measured.update(failed=0, note=f"told after {1e3 * took:.0f} ms")
        assert (huge.code, huge.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "REQUEST_TOO_LARGE")
        assert took < REFUSED_SECONDS
        same_tokens(finished, reference)


@pytest.mark.fault(13)
async def test_an_exhausted_pool_preempts_and_every_token_is_the_references(
    cluster: Processes, measured: dict[str, Any]
) -> None:
    """The demo model, with a pool for one sequence of full length: 14 blocks, 224 tokens."""
    tiny = (
        "--device",
        "cpu",
        "--deterministic",
        "--kv-cache-memory",
        str(14 * BLOCK_BYTES),
        "--max-model-len",
        "208",
    )
    roomy = cluster.add_worker("roomy", *DETERMINISTIC, "--max-model-len", "208")
    cramped = cluster.add_worker("cramped", *tiny)
    routers = [
        cluster.add_router(f"to-{worker.name}", workers=[worker.address]) for worker in (roomy, cramped)
    ]
    wanted = {"prefix": "many", "max_tokens": 60, "temperature": 0.0}
    with cluster.extra(roomy, cramped, *routers):
        tokens = []
        for router in routers:
            async with AsyncClient(router.address, retries=0) as client:
                tokens.append(await answers(client, streams(8, **wanted)))
        load_of = (await pool_of(cramped)).load
    measured.update(failed=0, migrated=0, note=f"{load_of.preemptions} preemptions of 8 sequences")
    same_tokens(tokens[1], tokens[0])
    each_ended_once(tokens[1])
    assert 0 < load_of.preemptions <= 8 * 5
