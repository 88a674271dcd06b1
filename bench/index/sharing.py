"""Bytes per block and look-up time over the number of workers that share the blocks: ours and llm-d's in turns.

Part of bench/index/__main__.py. Each case's index has been through churn. Up to 8 workers, which held half of the
shared chains and chains of their own, have died and been purged. The live workers have added and removed chains.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from blockyard.proto.index.redis import RedisPrefixIndex
from redis.asyncio import Redis

from bench.index.llmd import LlmdIndex, pod_entry
from bench.index.load import (
    CACHED_BLOCKS,
    CLUSTER,
    Names,
    Writer,
    add_all,
    die_and_purge,
    make_names,
    num_names,
    prompt_of,
    register_all,
)
from bench.index.server import measured, used_memory_bytes
from bench.reporting import percentile

STRIDE_BLOCKS = 4
REDIS_DEFAULT_VALUE_BYTES = 64
"""Redis's default of hash-max-listpack-value, which registration raises."""
MAX_DYING = 8
LookUp = Callable[[Names], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingScale:
    sharers: tuple[int, ...] = (1, 8, 40, 64)
    chains: int = 100
    """Number of chains of 375 blocks."""
    peer_chains: int = 12
    """Number of chains for llm-d. Its bytes per block do not depend on their number, and writing takes long."""
    lookups: int = 200
    """Look-ups per turn. llm-d's look-ups are slow, so a twentieth of them."""
    repeats: int = 5


@dataclass(slots=True, kw_only=True)
class LookUpTimes:
    """Times of look-ups in microseconds: one number per turn, and in `each_...` one per look-up."""

    server: list[float] = field(default_factory=list)
    """Time of commands, as Redis reports it."""
    server_cpu: list[float] = field(default_factory=list)
    """CPU time of the Redis process for a look-up, including parsing and replying."""
    wall: list[float] = field(default_factory=list)
    each_server: list[float] = field(default_factory=list)
    each_wall: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        spread = {"lowest": round(min(self.server), 1), "highest": round(max(self.server), 1)}
        numbers = {
            "server_us": median(self.server),
            "server_cpu_us": median(self.server_cpu),
            "wall_p50_us": median(self.wall),
            "wall_p99_us": percentile(self.each_wall, 0.99),
        }
        if self.each_server:
            numbers["server_p99_us"] = percentile(self.each_server, 0.99)
        return {name: round(value, 1) for name, value in numbers.items()} | {"server_us_spread": spread}


async def time_lookups(
    client: Redis, look_up: LookUp, prompts: Sequence[Names], times: LookUpTimes, command: str
) -> None:
    walls = []
    async with measured(client) as spent:
        for prompt in prompts:
            started = time.perf_counter()
            await look_up(prompt)
            walls.append(1e6 * (time.perf_counter() - started))
    times.server.append(spent.microseconds_by_command[command] / len(prompts))
    times.server_cpu.append(1e6 * spent.server_cpu_seconds / len(prompts))
    times.wall.append(median(walls))
    times.each_wall += walls
    times.each_server += spent.script_microseconds


def make_chains(count: int, seed: int) -> list[Names]:
    return [make_names(seed + number, CACHED_BLOCKS) for number in range(count)]


def make_prompts(chains: Sequence[Names], count: int, seed: int) -> list[Names]:
    return [prompt_of(chains[number % len(chains)], seed + number) for number in range(count)]


def joined(chains: Sequence[Names]) -> Names:
    return tuple(name for chain in chains for name in chain)


async def fill_after_churn(client: Redis, chains: Sequence[Names], sharers: int) -> RedisPrefixIndex:
    index = RedisPrefixIndex(client, CLUSTER)
    num_dying = min(sharers, MAX_DYING)
    living = await register_all(index, sharers)
    dying = await register_all(index, num_dying, first=sharers)
    shared, half = joined(chains), joined(chains[: len(chains) // 2])
    num_others = max(1, len(chains) // num_dying)
    others = [joined(make_chains(num_others, 10_000 * (1 + number))) for number in range(num_dying)]
    await add_all(living, [shared] * sharers)
    await add_all(dying, [half + names for names in others])
    await add_all(living[:num_dying], others)
    await die_and_purge(index, dying)
    for writer, names in zip(living, others, strict=False):
        await writer.remove(names)
    assert await num_names(client) == len(shared), "the purge left something"
    return index


async def measure_sharing(client: Redis, sharers: int, scale: SharingScale) -> dict[str, Any]:
    """Measure both schemas, which are side by side in one Redis while look-ups are timed in turns."""
    await client.flushall()
    chains = make_chains(scale.chains, seed=0)
    empty = await used_memory_bytes(client)
    index = await fill_after_churn(client, chains, sharers)
    ours = await used_memory_bytes(client)
    peer, peer_chains = LlmdIndex(client), chains[: scale.peer_chains]
    their_bytes = await _fill_theirs(client, peer, joined(peer_chains), sharers)
    await _check(index, peer, prompt_of(chains[0], 0), sharers)
    our_times, their_times = LookUpTimes(), LookUpTimes()
    for turn in range(scale.repeats):
        prompts = make_prompts(chains, scale.lookups, seed=turn * scale.lookups)
        their_prompts = make_prompts(peer_chains, max(1, scale.lookups // 20), seed=turn * scale.lookups)
        await time_lookups(client, index.lookup, prompts, our_times, "evalsha")
        await time_lookups(client, peer.lookup, their_prompts, their_times, "hkeys")
    return {
        "blocks": scale.chains * CACHED_BLOCKS,
        "blockyard_bytes_a_block": round((ours - empty) / (scale.chains * CACHED_BLOCKS), 1),
        **their_bytes,
        "blockyard": our_times.figures(),
        "llmd": their_times.figures(),
        "ratio_server": _ratios(their_times.server, our_times.server),
        "ratio_server_cpu": _ratios(their_times.server_cpu, our_times.server_cpu),
        "ratio_wall": _ratios(their_times.wall, our_times.wall),
    }


async def _fill_theirs(client: Redis, peer: LlmdIndex, names: Names, sharers: int) -> dict[str, float]:
    before = await used_memory_bytes(client)
    for worker in range(sharers):
        await peer.add(names, pod_entry(worker), with_engine_keys=False)
    without_engine_keys = await used_memory_bytes(client)
    await peer.add(names, pod_entry(0))
    after = await used_memory_bytes(client)
    return {
        "llmd_bytes_a_block": round((after - before) / len(names), 1),
        "llmd_bytes_a_block_without_engine_keys": round((without_engine_keys - before) / len(names), 1),
    }


async def _check(index: RedisPrefixIndex, peer: LlmdIndex, prompt: Names, sharers: int) -> None:
    depths = [holder.depth for holder in await index.lookup(prompt)]
    assert depths == [CACHED_BLOCKS] * sharers, f"look-up found {depths}"
    their_depths = list((await peer.lookup(prompt)).values())
    assert their_depths == depths, f"the peer's look-up found {their_depths}"


def _ratios(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """Return the median, lowest and highest of the ratios theirs / ours, turn by turn."""
    ratios = sorted(their / our for their, our in zip(theirs, ours, strict=True))
    return {
        "median": round(median(ratios), 2),
        "lowest": round(ratios[0], 2),
        "highest": round(ratios[-1], 2),
    }


async def measure_variations(client: Redis, sharers: int, scale: SharingScale) -> dict[str, Any]:
    """Measure variations of the same look-up, ours only and without floors."""
    chains = make_chains(max(1, scale.chains // 4), seed=0)
    prompts = make_prompts(chains, scale.lookups, seed=0)
    depths = [1 + n * (CACHED_BLOCKS - 1) // max(1, sharers - 1) for n in range(sharers)]
    uneven = [tuple(name for chain in chains for name in chain[:depth]) for depth in depths]
    every_fourth = [chain[STRIDE_BLOCKS - 1 :: STRIDE_BLOCKS] for chain in chains]
    strided_prompts = [prompt[STRIDE_BLOCKS - 1 :: STRIDE_BLOCKS] for prompt in prompts]
    shared = [joined(chains)] * sharers
    num_blocks = len(chains) * CACHED_BLOCKS
    return {
        "sharers": sharers,
        "uneven_depths": await _vary(client, uneven, prompts, num_blocks, scale.repeats),
        "stride": await _vary(
            client, [joined(every_fourth)] * sharers, strided_prompts, num_blocks, scale.repeats
        ),
        "host_tier": await _vary(client, shared, prompts, num_blocks, scale.repeats, has_host_cache=True),
        "default_value_bound": await _vary(
            client, shared, prompts, num_blocks, scale.repeats, value_bytes=REDIS_DEFAULT_VALUE_BYTES
        ),
        "raised_value_bound": await _vary(client, shared, prompts, num_blocks, scale.repeats),
    }


async def _vary(
    client: Redis,
    names_of_each: Sequence[Names],
    prompts: Sequence[Names],
    num_blocks: int,
    repeats: int,
    *,
    has_host_cache: bool = False,
    value_bytes: int | None = None,
) -> dict[str, Any]:
    """Measure one variation: bytes per block and look-up times.

    With a host cache, each worker publishes its names for both tiers.
    """
    await client.flushall()
    empty = await used_memory_bytes(client)
    index = RedisPrefixIndex(client, CLUSTER)
    for number, names in enumerate(names_of_each):
        writer = await Writer.register(index, number, has_host_cache=has_host_cache)
        if value_bytes is not None:
            await client.config_set("hash-max-ziplist-value", value_bytes)
        await writer.add(names, names if has_host_cache else ())
    bytes_a_block = (await used_memory_bytes(client) - empty) / num_blocks
    times = LookUpTimes()
    for _ in range(repeats):
        await time_lookups(client, index.lookup, prompts, times, "evalsha")
    return {"bytes_a_block": round(bytes_a_block, 1), **times.figures()}
