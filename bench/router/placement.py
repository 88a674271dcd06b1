"""Placement path alone: token ids -> names of blocks -> one look-up in a real Redis -> a worker.

Runs in this process, with the product's Placer, PrefixLookup, RedisPrefixIndex and a Fleet of 64 registered workers. No
worker runs. A prompt has 7,200 tokens, of which 6,000 belong to its group and are cached by 8 workers. Some requests
are always in flight, so that the bookings are not empty. Times are in milliseconds.
"""

import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from blockyard.deploy.machine.redis_server import start_private_redis
from blockyard.proto.index.contract import Batch, Incarnation, PrefixIndex, WorkerId, WorkerRecord
from blockyard.proto.index.redis import RedisPrefixIndex, connect
from blockyard.proto.naming.block_hash import chain, pack_tokens, unpack_tokens
from blockyard.proto.v1 import cluster_pb2, session_pb2
from blockyard.router.cluster.bookings import Placed
from blockyard.router.cluster.fleet import Fleet
from blockyard.router.cluster.link import EngineLink
from blockyard.router.dispatch.placer import Placer
from blockyard.router.dispatch.prefix_lookup import PrefixLookup
from blockyard.router.placement.policies import PlacementRequest, place
from blockyard.router.tokenizing.service import TextPrompt, TokenizerService, TokenPrompt

NUM_WORKERS = 64
HOLDERS = 8
GROUPS = 16
BLOCK_SIZE = 16
GROUP_TOKENS = 6000
PROMPT_TOKENS = 7200
VOCABULARY = 32_000
IN_FLIGHT = 128
LEASE_SECONDS = 600.0
SILENCE_SECONDS = 1e6
"""Silence after which a worker is suspect. It is long, because no process sends reports for these workers."""
WARM_UP = 50
PARTS = ("names", "look-up", "candidates", "choice")


@dataclass(slots=True)
class PlacementTimes:
    """Times of each call, in milliseconds."""

    whole: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    hits: int = 0
    """Placements on a worker that holds the prompt's prefix."""


class PlacementBench:
    """One router's placement path over a filled index."""

    def __init__(self, fleet: Fleet, placer: Placer, seed: int) -> None:
        self._fleet = fleet
        self._placer = placer
        self._random = Random(seed)
        self._groups = [self._draw(GROUP_TOKENS) for _ in range(GROUPS)]
        self._in_flight: deque[Placed] = deque()
        assert fleet.identity is not None
        self._root = fleet.identity.root(cluster_secret="", salt="")

    def _draw(self, num_tokens: int) -> list[int]:
        return self._random.choices(range(VOCABULARY), k=num_tokens)

    def _prompt(self) -> tuple[int, bytes]:
        """Draw a prompt. Return its group and its token ids, packed as the tokenizer process sends them."""
        group = self._random.randrange(GROUPS)
        return group, pack_tokens(self._groups[group] + self._draw(PROMPT_TOKENS - GROUP_TOKENS))

    async def fill(self, index: PrefixIndex) -> None:
        """Publish each group's prefix on HOLDERS workers."""
        prefixes = [chain(self._root, tokens, BLOCK_SIZE) for tokens in self._groups]
        for number in range(NUM_WORKERS):
            berth = await index.register(record_of(number), lease_seconds=LEASE_SECONDS)
            mine = [names for group, names in enumerate(prefixes) if _holds(number, group)]
            for sequence, names in enumerate(mine, start=1):
                await index.apply(berth, Batch(sequence=sequence, added=tuple(names)))

    async def measure(self, times: PlacementTimes, calls: int) -> None:
        for call in range(WARM_UP + calls):
            into = times if call >= WARM_UP else PlacementTimes()
            await self._whole(into)
            await self._parts(into)

    async def _whole(self, times: PlacementTimes) -> None:
        group, packed = self._prompt()
        started = time.perf_counter()
        names = chain(self._root, packed, BLOCK_SIZE)
        placed = await self._placer.place(names, PROMPT_TOKENS, self._placer.ticket())
        times.whole.append(1000 * (time.perf_counter() - started))
        times.hits += _holds(int(placed.address), group)
        self._in_flight.append(placed)
        if len(self._in_flight) > IN_FLIGHT:
            self._placer.ended(self._in_flight.popleft())

    async def _parts(self, times: PlacementTimes) -> None:
        _, packed = self._prompt()
        stamps = array("d", [time.perf_counter()])
        names = chain(self._root, packed, BLOCK_SIZE)
        stamps.append(time.perf_counter())
        found = await self._placer.look_up(names)
        stamps.append(time.perf_counter())
        candidates = self._fleet.view.candidates(names, PROMPT_TOKENS, found.depth_by_worker)
        stamps.append(time.perf_counter())
        place(PlacementRequest(prompt_tokens=PROMPT_TOKENS), candidates, "prefix", self._random)
        stamps.append(time.perf_counter())
        assert len(candidates) == NUM_WORKERS
        for part, before, after in zip(PARTS, stamps[:-1], stamps[1:], strict=True):
            times.parts[part].append(1000 * (after - before))


def _holds(worker: int, group: int) -> bool:
    return (worker - group * HOLDERS) % NUM_WORKERS < HOLDERS


def record_of(number: int) -> WorkerRecord:
    return WorkerRecord(
        worker_id=WorkerId(f"w{number}"),
        incarnation=Incarnation(f"w{number}-life-1"),
        address=str(number),
        fingerprint="model",
        block_size=BLOCK_SIZE,
    )


def make_fleet(num_workers: int = NUM_WORKERS) -> Fleet:
    fleet = Fleet(
        tokenizer_fingerprint="t",
        suspect_seconds=SILENCE_SECONDS,
        lost_seconds=2 * SILENCE_SECONDS,
    )
    for number in range(num_workers):
        address = str(number)
        fleet.links[address] = EngineLink(address, fleet, lost_seconds=SILENCE_SECONDS)
        refusal = fleet.accept(address, _hello(number))
        assert refusal is None, refusal
        load = cluster_pb2.WorkerLoad(prefill_tokens_per_second=50_000, decode_tokens_per_second=2_000)
        fleet.heard(address, load)
    return fleet


def _hello(number: int) -> session_pb2.Hello:
    return session_pb2.Hello(
        worker_id=f"w{number}",
        incarnation=f"w{number}-life-1",
        model_fingerprint="model",
        tokenizer_fingerprint="t",
        block_size=BLOCK_SIZE,
        kv_dtype="float16",
        total_blocks=30_000,
        max_model_len=32_768,
        vocab_size=VOCABULARY,
        transfer_port=1,
        block_bytes=BLOCK_SIZE * 131_072,
        kv_layout="order=plain/1",
        kv_arithmetic="dtype=float16",
    )


@asynccontextmanager
async def placement_bench(seed: int) -> AsyncIterator[PlacementBench]:
    with TemporaryDirectory() as folder:
        redis = start_private_redis(Path(folder))
        try:
            async with connect(redis.url, timeout_seconds=5.0) as client:
                index = RedisPrefixIndex(client, "bench")
                fleet = make_fleet()
                placer = Placer(fleet, PrefixLookup(index), policy="prefix", no_worker_seconds=5.0)
                bench = PlacementBench(fleet, placer, seed)
                await bench.fill(index)
                yield bench
        finally:
            redis.stop()


async def tokenizing_times(
    model: str, prompt: Callable[[int], str], calls: int
) -> tuple[dict[str, list[float]], int]:
    """Measure the hop to the tokenizer process and back, block names included, for a text and for its token ids.

    Return milliseconds by kind of prompt, and the number of tokens.
    """
    times: dict[str, list[float]] = {"text": [], "token ids": []}
    async with TokenizerService(model) as service:
        prepared = await service.prepare(TextPrompt(prompt(0)), root=None, block_size=BLOCK_SIZE)
        ids = TokenPrompt(unpack_tokens(prepared.token_ids))
        for call in range(calls):
            for name, given in (("text", TextPrompt(prompt(call))), ("token ids", ids)):
                started = time.perf_counter()
                await service.prepare(given, root=bytes(16), block_size=BLOCK_SIZE)
                times[name].append(1000 * (time.perf_counter() - started))
    return times, prepared.num_tokens
