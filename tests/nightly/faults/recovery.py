"""I7: compares a steady load after a fault with the same load before it, and the resources held then.

A round repeats the same requests with different last words, so that only shared prefixes hit the cache. The share of
prompt tokens found is nearly the same in each round. Throughput is a timing, and other programs reduce it.

Owns the rounds and the comparison. Does not own the faults (test_recovery.py) or the cluster (redis_rig.py).
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from blockyard.router.client import AsyncClient
from blockyard.router.client.errors import BlockyardError

from tests.system.load import until

from .invariants import Usage, blocks_are_free, nothing_is_told
from .redis_course import Action, prompt
from .redis_rig import RedisCluster, strays

NUM_USERS = 6
REQUESTS_A_USER = 5
MAX_TOKENS = 20
NUM_ROUNDS = 3
"""Rounds before the fault, and after it, that give the reported throughput."""
STEADY_DIFFERENCE = 0.02
"""Maximum difference between the hit rates of two consecutive rounds, once caches are warm."""
MAX_WARM_UP_ROUNDS = 10
LEAST_HIT_RATE = 0.95
LEAST_THROUGHPUT = 0.4
"""Least share of the values before the fault. The design requires 0.95 of both; a busy machine alone halves a
throughput."""
RECOVERY_SECONDS = 5.0
"""Bound from the end of the fault to a round with the hit rate of before. Tests allow ten times it."""
GIVEN_BACK_SECONDS = 60.0
FEW = 3
"""Tolerance: threads and tasks that come and go by themselves."""
FEW_DESCRIPTORS = 6
"""Tolerance: `FEW`, and three descriptors of the spare tokenizer process, which a router starts some time after
itself."""
FEW_BYTES = 24 * 2**20
FEW_KEYS = 2
"""Tolerance: the keys of free berths and of former workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Totals of some rounds."""

    seconds: float
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int

    @classmethod
    def together(cls, rounds: Sequence["Rounds"]) -> "Rounds":
        return cls(
            seconds=sum(each.seconds for each in rounds),
            generated_tokens=sum(each.generated_tokens for each in rounds),
            prompt_tokens=sum(each.prompt_tokens for each in rounds),
            cached_tokens=sum(each.cached_tokens for each in rounds),
        )

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds

    def is_about_as_fast_as(self, before: "Rounds") -> bool:
        return self.tokens_per_second >= LEAST_THROUGHPUT * before.tokens_per_second


class SteadyLoad:
    """A few users, each of whom asks again as soon as the answer is there."""

    def __init__(self) -> None:
        self._numbers = count(time.monotonic_ns())
        self.errors: list[BlockyardError] = []

    async def round(self, client: AsyncClient) -> Rounds:
        """Ask, and keep errors instead of raising them. After an error the user asks again."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            users = [tasks.create_task(self._user(client)) for _ in range(NUM_USERS)]
        found = Rounds.together([each for user in users for each in user.result()])
        return Rounds(
            seconds=time.monotonic() - began,
            generated_tokens=found.generated_tokens,
            prompt_tokens=found.prompt_tokens,
            cached_tokens=found.cached_tokens,
        )

    async def rounds(self, client: AsyncClient, number: int = NUM_ROUNDS) -> Rounds:
        return Rounds.together([await self.round(client) for _ in range(number)])

    async def warm_up(self, client: AsyncClient) -> None:
        """Run rounds until what is shared is cached."""
        before = 0.0
        for _ in range(MAX_WARM_UP_ROUNDS):
            hit_rate = (await self.round(client)).hit_rate
            if 0 < hit_rate <= before + STEADY_DIFFERENCE:
                return
            before = hit_rate
        raise AssertionError(f"the hit rate still grows after {MAX_WARM_UP_ROUNDS} rounds")

    async def _user(self, client: AsyncClient) -> list[Rounds]:
        done: list[Rounds] = []
        while len(done) < REQUESTS_A_USER:
            number = next(self._numbers)
            try:
                answer = await client.generate(
                    prompt(number), max_tokens=MAX_TOKENS, seed=number % 1000, ignore_eos=True
                )
            except BlockyardError as error:
                self.errors.append(error)
                await asyncio.sleep(0.1)
                continue
            finish = answer.finish
            done.append(
                Rounds(
                    seconds=0.0,
                    generated_tokens=finish.completion_tokens,
                    prompt_tokens=finish.prompt_tokens,
                    cached_tokens=finish.cached_tokens,
                )
            )
        return done


async def recovers(
    cluster: RedisCluster,
    measured: dict[str, Any],
    *,
    harm: Action,
    heal: Action,
    hold_seconds: float = 1.0,
    may_fail: bool = False,
) -> None:
    """Run a steady load, `harm` and `heal` beside it, and the load again. Asserts I7, and that no request failed.
    Requests may fail while no process is there to answer them, if the caller permits it."""
    load, num_tasks = SteadyLoad(), len(asyncio.all_tasks())
    async with cluster.client() as client:
        await cluster.until_exact(client)
        await load.warm_up(client)
        before = await load.rounds(client)
        held = await _Held.of(cluster)
        disturbed = asyncio.create_task(load.round(client))
        await asyncio.to_thread(harm)
        await asyncio.sleep(hold_seconds)
        await asyncio.to_thread(heal)
        healed_at = time.monotonic()
        await disturbed
        assert may_fail or not load.errors, load.errors
    async with cluster.client() as client:
        await until(lambda: _is_exact(cluster, client), "the cluster is whole", seconds=10 * RECOVERY_SECONDS)
        load.errors.clear()
        while (await load.round(client)).hit_rate < LEAST_HIT_RATE * before.hit_rate:
            _check_patience("the hit rate", healed_at)
        recovered_seconds = time.monotonic() - healed_at
        while not (after := await load.rounds(client)).is_about_as_fast_as(before):
            _check_patience("throughput", healed_at)
        left = await _given_back(cluster, held)
    hit_rate = after.hit_rate / before.hit_rate
    throughput = after.tokens_per_second / before.tokens_per_second
    measured.update(
        failed=0,
        recovery_seconds=recovered_seconds,
        note=f"hit rate {hit_rate:.1%} of {before.hit_rate:.0%}, throughput {throughput:.0%} of before; "
        f"{left.told(held)}",
    )
    assert not load.errors, load.errors
    assert hit_rate >= LEAST_HIT_RATE
    assert len(asyncio.all_tasks()) <= num_tasks
    nothing_is_told(cluster.processes.logs())


def _check_patience(what: str, healed_at: float) -> None:
    took = time.monotonic() - healed_at
    assert took < 10 * RECOVERY_SECONDS, f"{what} is not back after {took:.0f} s"


async def _is_exact(cluster: RedisCluster, client: AsyncClient) -> bool:
    try:
        return await cluster.is_exact(client)
    except BlockyardError:
        return False


async def _given_back(cluster: RedisCluster, held: "_Held") -> "_Held":
    """Return what is held once it is about as much as before."""
    deadline = time.monotonic() + GIVEN_BACK_SECONDS
    while (left := await _Held.of(cluster)).more_than(held):
        assert time.monotonic() < deadline, left.more_than(held)
        await asyncio.sleep(0.5)
    return left


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Resources that processes and Redis hold while nothing runs. By name: a restarted process is compared with
    itself."""

    usages: dict[str, Usage]
    tasks: dict[str, int]
    """Number of event loop tasks, by process."""
    num_keys: int
    num_strays: int

    @classmethod
    async def of(cls, cluster: RedisCluster) -> "_Held":
        for worker in cluster.workers:
            await blocks_are_free(worker)
        with cluster.redis.client() as straight:
            num_strays = strays(straight, cluster.prefix)
        everyone = (*cluster.workers, cluster.router)
        return cls(
            usages={process.name: Usage.of(process.pid) for process in everyone},
            tasks={process.name: await asyncio.to_thread(process.num_tasks) for process in everyone},
            num_keys=cluster.num_keys(),
            num_strays=num_strays,
        )

    def more_than(self, before: "_Held") -> list[str]:
        """Return what has grown beyond the tolerances."""
        return [
            f"{told}: {then} -> {now}"
            for told, now, then, most in self._compared(before)
            if now > then + most
        ]

    def told(self, before: "_Held") -> str:
        """Return the largest growth of each kind."""
        growths: dict[str, float] = {}
        for told, now, then, _ in self._compared(before):
            kind = told.partition(" of ")[0]
            growths[kind] = max(growths.get(kind, now - then), now - then)
        growths["MiB"] = growths.pop("bytes") / 2**20
        return ", ".join(f"{kind} {growth:+.3g}" for kind, growth in growths.items())

    def _compared(self, before: "_Held") -> Iterator[tuple[str, int, int, int]]:
        kinds: tuple[tuple[str, Callable[[Usage], int], int], ...] = (
            ("descriptors", lambda usage: usage.descriptors, FEW_DESCRIPTORS),
            ("threads", lambda usage: usage.threads, FEW),
            ("bytes", lambda usage: usage.resident_bytes, FEW_BYTES),
        )
        for name, usage in self.usages.items():
            for kind, value, most in kinds:
                yield f"{kind} of {name}", value(usage), value(before.usages[name]), most
            yield f"tasks of {name}", self.tasks[name], before.tasks[name], FEW
        yield "keys", self.num_keys, before.num_keys, FEW_KEYS
        yield "strays", self.num_strays, before.num_strays, 0
