"""The soak detects a leak, a wrong token and a call that ends wrongly; and forty seconds of it pass."""

import asyncio
import itertools
import random
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from blockyard.router.client import AsyncClient
from blockyard.router.client.errors import UnavailableError
from blockyard.router.client.results import Delta, Finish

from tests.nightly.faults.invariants import Usage
from tests.nightly.faults.soak import Soak, soaked, told
from tests.nightly.faults.soak_cluster import MORTAL_ROUTER, MORTAL_WORKER
from tests.nightly.faults.soak_faults import FAULTS, drawn
from tests.nightly.faults.soak_load import RouterDeath, SoakLoad, Struck
from tests.nightly.faults.soak_requests import Kind, malformed
from tests.nightly.faults.soak_samples import (
    MIB,
    Life,
    RedisSample,
    Sample,
    Samples,
    redis_growth,
    slope_per_minute,
)

QUICK = Kind(name="quick", prompt="def f(x):", arguments={"max_tokens": 4, "seed": 1})
TOKENS = [11, 12, 13, 14]
ROUTER = "127.0.0.1:20001"


def a_life(
    *,
    minutes: float,
    bytes_per_minute: float = 0,
    at_start_bytes: float = 0,
    descriptors: Sequence[int] = (30,),
    threads: Sequence[int] = (9,),
) -> Life:
    """A sample each half minute. Allocators are never quite flat; `at_start_bytes` come within the first tenth."""
    noise = random.Random(0)
    life = Life(name="w0", pid=1)
    for number in range(int(2 * minutes) + 1):
        begun = min(1.0, number / (0.2 * minutes))
        grown = bytes_per_minute * number / 2 + at_start_bytes * begun + noise.uniform(0, MIB)
        usage = Usage(
            resident_bytes=int(250 * MIB + grown),
            descriptors=descriptors[min(number, len(descriptors) - 1)],
            threads=threads[min(number, len(threads) - 1)],
        )
        life.samples.append(Sample(at_seconds=30 * number, usage=usage))
    return life


def growth(life: Life) -> list[str]:
    return Samples(lives={life.pid: life}).growth()


def test_the_slope_is_that_of_the_line() -> None:
    assert slope_per_minute([(0, 5), (30, 6), (60, 7), (120, 9)]) == pytest.approx(2)
    assert slope_per_minute([(0, 5), (60, 5), (120, 5)]) == 0
    assert slope_per_minute([(10, 5)]) == 0
    assert slope_per_minute([(10, 5), (10, 9)]) == 0


@pytest.mark.parametrize("minutes", [1, 4, 6, 30])
def test_what_does_not_grow_is_not_said_to_grow(minutes: float) -> None:
    assert growth(a_life(minutes=minutes)) == []


def test_the_warm_up_is_not_taken_for_a_leak() -> None:
    assert growth(a_life(minutes=30, at_start_bytes=80 * MIB)) == []


def test_a_leak_of_a_megabyte_a_minute_is_seen() -> None:
    (found,) = growth(a_life(minutes=30, bytes_per_minute=1.2 * MIB))
    assert "memory grows by" in found
    assert growth(a_life(minutes=30, bytes_per_minute=0.7 * MIB)) == []


def test_in_a_short_life_a_buffer_kept_for_each_request_is_seen() -> None:
    """100 requests a minute on a worker, each of which leaves 64 KiB."""
    (found,) = growth(a_life(minutes=2, bytes_per_minute=100 * 64 * 1024))
    assert "memory grew by" in found


@pytest.mark.parametrize("what", ["descriptors", "threads"])
def test_descriptors_and_threads_that_stay_are_seen(what: str) -> None:
    (found,) = growth(a_life(minutes=6, **{what: (30, 32, 34, 38, 41, 43)}))  # type: ignore[arg-type]
    assert found == f"w0 (pid 1): {what}: 30 -> 43"
    assert growth(a_life(minutes=6, **{what: (30, 90, 31)})) == []  # type: ignore[arg-type]


def test_tasks_that_stay_are_seen() -> None:
    life = a_life(minutes=1)
    usage = life.samples[0].usage
    life.samples[:] = [
        Sample(at_seconds=10 * number, usage=usage, tasks=40 + 10 * number) for number in range(4)
    ]
    assert growth(life) == ["w0 (pid 1): tasks: 40 -> 70"]


def test_a_process_that_was_started_again_is_compared_with_itself() -> None:
    samples = Samples()
    for pid, size in ((1, 250 * MIB), (2, 300 * MIB)):
        for number in range(3):
            usage = Usage(resident_bytes=size, descriptors=10 * pid, threads=20 * pid)
            samples.add("w3", pid, Sample(at_seconds=100 * pid + 10 * number, usage=usage))
    assert samples.growth() == []
    assert [life.name for life in samples.lives.values()] == ["w3", "w3"]


def test_keys_and_memory_of_redis_that_stay_are_seen() -> None:
    def of(*found: tuple[int, float]) -> list[RedisSample]:
        return [
            RedisSample(at_seconds=60 * number, keys=keys, used_bytes=int(used * MIB))
            for number, (keys, used) in enumerate(found)
        ]

    assert redis_growth(of((8, 1), (12, 2), (9, 2), (30, 2))) == []
    assert redis_growth(of((8, 1), (90, 2), (180, 2))) == ["Redis: keys: 90 -> 180"]
    assert redis_growth(of((8, 1), (9, 2), (9, 7))) == ["Redis: memory: 2.0 -> 7.0 MiB"]


def test_a_seed_says_which_faults_come_and_each_comes_as_often() -> None:
    first, again = (list(itertools.islice(drawn(7), 3 * len(FAULTS))) for _ in range(2))
    assert first == again
    assert first != list(itertools.islice(drawn(8), 3 * len(FAULTS)))
    assert {fault.kind for fault in first[: len(FAULTS)]} == FAULTS.keys()
    killed = {fault.target for fault in first if "SIGKILL" in fault.kind}
    assert killed == {MORTAL_WORKER, MORTAL_ROUTER, "Redis"}


class Scripted(AsyncClient):
    """Its streams bring these tokens and then end, perhaps with an error."""

    def __init__(
        self, tokens: Sequence[int], *, error: UnavailableError | None = None, seconds: float = 0.0
    ) -> None:
        super().__init__(ROUTER)
        self._tokens, self._error, self._seconds = tuple(tokens), error, seconds

    def stream(
        self, prompt: str | None = None, *, timeout_seconds: float | None = None, **arguments: Any
    ) -> AsyncGenerator[Delta, None]:
        return self._scripted(arguments["request_id"])

    async def _scripted(self, request_id: str) -> AsyncGenerator[Delta, None]:
        finish = Finish(
            reason="length",
            stop_reason=None,
            prompt_tokens=3,
            completion_tokens=len(self._tokens),
            cached_tokens=0,
            seed=1,
            time_to_first_token_seconds=0.0,
            total_seconds=0.0,
            worker_id="w1",
            migrations=1,
        )
        yield Delta(request_id=request_id, text="", token_ids=self._tokens, token_offset=0, finish=None)
        await asyncio.sleep(self._seconds)
        if self._error is not None:
            raise self._error
        yield Delta(
            request_id=request_id, text="", token_ids=(), token_offset=len(self._tokens), finish=finish
        )


def a_load() -> SoakLoad:
    return SoakLoad(addresses=[ROUTER], seed=0, kinds=[QUICK], references={"quick": {0: TOKENS}})


def lost(reason: str = "") -> UnavailableError:
    return UnavailableError(
        f"lost the connection to the router at {ROUTER} in mid-stream",
        code=grpc.StatusCode.UNAVAILABLE,
        reason=reason,
    )


async def test_a_true_stream_is_counted_and_no_violation() -> None:
    load = a_load()
    load.struck.append(Struck(kind="link cut", target="w0", at=time.monotonic() - 1))
    await load.ask(Scripted(TOKENS), QUICK, "r")
    assert (load.outcomes, load.violations) == ({"finished": 1}, [])
    assert load.struck[0].migrated == 1


@pytest.mark.parametrize("tokens", [[11, 12, 13], [11, 12, 12, 13, 14], [11, 12, 99, 14], [*TOKENS, 15]])
async def test_a_lost_doubled_wrong_or_extra_token_is_a_violation(tokens: list[int]) -> None:
    load = a_load()
    await load.ask(Scripted(tokens), QUICK, "r")
    (violation,) = load.violations
    assert "leaves the undisturbed run" in violation


@pytest.mark.parametrize("text", ["", '{"name": "a", "sizes": [1', '{"name": "a"}', "[1]", "7"])
def test_output_that_does_not_follow_its_schema_is_a_violation(text: str) -> None:
    stream = QUICK.stream("r")
    stream.text = {0: '{"name": "a", "sizes": [1], "is_open": true}', 1: text}
    (violation,) = malformed(stream)
    assert "output 1" in violation


async def test_what_came_before_an_error_must_be_true_too() -> None:
    load = a_load()
    load.router_deaths.append(RouterDeath(address=ROUTER, at=time.monotonic()))
    await load.ask(Scripted([11, 99], error=lost()), QUICK, "r")
    (violation,) = load.violations
    assert "at token 1" in violation


async def test_unavailable_is_a_violation_unless_its_router_was_killed() -> None:
    load = a_load()
    await load.ask(Scripted([11], error=lost()), QUICK, "r")
    assert load.outcomes == {"failed": 1}
    (violation,) = load.violations
    assert "UNAVAILABLE" in violation
    with pytest.raises(AssertionError):
        load.check()
    dead = a_load()
    dead.router_deaths.append(RouterDeath(address=ROUTER, at=time.monotonic()))
    await dead.ask(Scripted([11], error=lost()), QUICK, "r")
    assert (dead.outcomes, dead.violations) == ({"lost with its router": 1}, [])
    # A live router gives the reason, so no router's death explains the end.
    await dead.ask(Scripted([11], error=lost("WORKER_LOST")), QUICK, "r")
    assert len(dead.violations) == 1


async def test_a_stream_that_ends_after_its_deadline_is_a_violation() -> None:
    load = a_load()
    hurried = Kind(name="quick", prompt="def f(x):", arguments={}, timeout_seconds=0.1)
    await load.ask(Scripted(TOKENS, seconds=1.2), hurried, "r")
    (violation,) = load.violations
    assert "ended after 1.2 s of 0.1 s" in violation


@pytest.mark.cluster
@pytest.mark.slow_fault
@pytest.mark.fault(50)
def test_forty_seconds_of_random_faults_leave_everything_as_it_was(
    tmp_path: Path, measured: dict[str, Any]
) -> None:
    soak = Soak(seed=random.randrange(10**6), minutes=40 / 60)
    soaked(soak, tmp_path)
    print("\n".join(told(soak, ["soak"])))
    assert soak.failure == ""
    assert soak.load is not None
    struck = soak.load.struck
    measured.update(
        failed=sum(each.failed for each in struck),
        migrated=sum(each.migrated for each in struck),
        recovery_seconds=max(each.longest_pause for each in struck),
        note=f"{len(struck)} faults in 40 s; failed: lost with the router that held them",
    )
    assert len(struck) >= 3
    assert soak.load.outcomes["finished"] > len(struck)
    assert len(soak.samples.redis) >= 3
