"""Study of eviction: the reuse of prompts by policy, beside LRU and Belady's optimum, on caches of several sizes.

    python -m bench.placement.eviction --trace mooncake_conversation.jsonl

Each request finds its longest cached prefix, takes blocks for the rest of its prompt and for its output, and is over
before the next one. No policy may evict a block before its children. `odds` is the worker's own pool and prefix cache.
The other policies are models here: each evicts the leaf with the lowest key.

Belady's optimum evicts the leaf whose next use is farthest. It knows the future, so no policy can reach it.
"""

import argparse
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from blockyard.deploy.bench.workloads.mooncake import TRACE_BLOCK_TOKENS, read_trace
from blockyard.deploy.bench.workloads.requests import PlannedRequest, Run, Workload
from blockyard.worker.cache.block_pool import BlockPool
from blockyard.worker.cache.pauses import NOT_PAUSED, bucket_of
from blockyard.worker.cache.prefix_cache import PrefixCache
from blockyard.worker.sequences.identifiers import BlockName

from bench.placement.simulation.workloads import GENERATORS
from bench.reporting import Floor, write_report

OUTPUT_TOKENS_PER_SECOND = 50.0
"""Pace of outputs, which decides when a conversation's next request comes."""
RECENT = 64
"""Requests over which the cluster's placement balances its workers."""
NUM_WORKERS = 4
Key = tuple[float, ...]


class Request(NamedTuple):
    names: list[int]
    """Blocks of the prompt and the output. Equal prefixes have equal names."""
    num_findable: int
    """Leading blocks that may be found: the last prompt token is always computed."""
    num_prompt_blocks: int
    prompt_tokens: int
    session: str = ""
    arrival: float = 0.0
    due: float = 0.0
    """When its client expects to come back, in seconds. 0: it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    name: str
    build: Callable[[int], Workload]
    block_tokens: int
    sizes: tuple[int, ...]
    """Sizes of the cache, in blocks."""
    is_trace: bool = False


def requests_of(workload: Workload, block_tokens: int) -> list[Request]:
    """Return the requests by arrival, with names instead of tokens."""
    arrivals: dict[int, float] = {}
    ends: dict[int, float] = {}
    for each in workload.requests:
        arrivals[each.number] = each.arrival_seconds + (0.0 if each.follows is None else ends[each.follows])
        ends[each.number] = arrivals[each.number] + each.output.length / OUTPUT_TOKENS_PER_SECOND
    known: dict[tuple[Any, ...], int] = {}
    found = []
    for each in sorted(workload.requests, key=lambda request: arrivals[request.number]):
        names, parent = [], -1
        for content in _contents(each, block_tokens):
            parent = known.setdefault((parent, *content), len(known))
            names.append(parent)
        size = each.prompt_tokens
        pause = each.expected_pause_seconds
        found.append(
            Request(
                names, (size - 1) // block_tokens, size // block_tokens, size, each.session,
                arrival=arrivals[each.number], due=ends[each.number] + pause if pause else 0.0,
            )
        )  # fmt: skip
    return found


def _contents(request: PlannedRequest, block_tokens: int) -> Iterator[tuple[Run, ...]]:
    """Yield the runs of each full block of the prompt and the output, whose last token is never stored."""
    parts: list[Run] = []
    room = block_tokens
    for run in (*request.prompt, Run(request.output.base, request.output.length - 1)):
        base, left = run.base, run.length
        while left:
            taken = min(left, room)
            if parts and parts[-1].base + parts[-1].length == base:
                parts[-1] = Run(parts[-1].base, parts[-1].length + taken)
            else:
                parts.append(Run(base, taken))
            base, left, room = base + taken, left - taken, room - taken
            if not room:
                yield tuple(parts)
                parts, room = [], block_tokens


def ideal(requests: Sequence[Request], block_tokens: int) -> float:
    """Return the reuse of a cache without limit."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        hits += _num_leading(request, seen)
        seen.update(request.names)
    return hits * block_tokens / sum(request.prompt_tokens for request in requests)


def _num_leading(request: Request, cached: Any) -> int:
    findable = request.names[: request.num_findable]
    return next((at for at, name in enumerate(findable) if name not in cached), len(findable))


class WorkerCache:
    """The worker's own pool and prefix cache."""

    def __init__(self, num_blocks: int) -> None:
        self._pool = BlockPool(num_blocks)
        self._cache = PrefixCache(self._pool)

    def num_held(self, request: Request) -> int:
        return len(self._cache.match(_bytes(request.names[: request.num_findable])))

    def serve(self, request: Request, at: int) -> int:
        """Serve a request, and return how many blocks it found."""
        self._pool.now_seconds = request.arrival
        names = _bytes(request.names)
        found = self._cache.match(names[: request.num_findable])
        self._pool.share(found)
        num_new = min(len(names) - len(found), self._pool.num_allocatable)
        table = found + self._pool.allocate(num_new)
        for index in range(len(found), len(table)):
            is_generated = index >= request.num_prompt_blocks
            parent = names[index - 1] if index else None
            self._cache.assign(table[index], names[index], parent=parent, is_generated=is_generated)
        self._cache.confirm_all(table)
        if request.due or self._pool.has_pauses:
            bucket = bucket_of(request.due) if request.due else NOT_PAUSED
            self._pool.release(table, bucket=bucket, first_alone=self._cache.first_alone(table))
        else:
            self._pool.release(table)
        self._cache.take_changes()
        return len(found)


def _bytes(names: Sequence[int]) -> list[BlockName]:
    return [BlockName(name.to_bytes(16, "big")) for name in names]


@dataclass(slots=True)
class Facts:
    """Facts that a policy may know of a block. Times count requests."""

    depth: int
    last_use: int
    use_before: int = -1
    num_hits: int = 0
    next_use: float = inf


class ModelCache:
    """A cache that evicts the leaf with the lowest key. `holders` counts, by name, the caches of a cluster."""

    def __init__(
        self, num_blocks: int, key: "Callable[[ModelCache, int], Key]", holders: dict[int, int] | None = None
    ) -> None:
        self.facts: dict[int, Facts] = {}
        self.holders: dict[int, int] = {} if holders is None else holders
        self.floor = 0.0
        """The highest first part of a key that was evicted: the age of LFU with ageing."""
        self._num_blocks = num_blocks
        self._key = key
        self._keys: dict[int, Key] = {}
        self._parents: dict[int, int] = {}
        self._num_children: dict[int, int] = {}
        self._leaves: list[tuple[Key, int, int]] = []

    def serve(self, request: Request, at: int, next_uses: Sequence[float] = ()) -> int:
        found, used = _num_leading(request, self.facts), set(request.names)
        for index, name in enumerate(request.names):
            if name in self.facts:
                facts = self.facts[name]
                if index < found:
                    facts.num_hits += 1
                facts.use_before, facts.last_use = facts.last_use, at
            else:
                if len(self.facts) >= self._num_blocks and not self._evict(used):
                    break
                self._store(name, request.names[index - 1] if index else -1, Facts(index, at))
            if next_uses:
                self.facts[name].next_use = next_uses[index]
        for name in reversed(request.names):
            if name in self.facts:
                self._keys[name] = self._key(self, name)
                self._offer(name)
        return found

    def num_held(self, request: Request) -> int:
        return _num_leading(request, self.facts)

    def _store(self, name: int, parent: int, facts: Facts) -> None:
        self.facts[name], self._parents[name] = facts, parent
        self.holders[name] = self.holders.get(name, 0) + 1
        self._num_children[parent] = self._num_children.get(parent, 0) + 1

    def _offer(self, name: int) -> None:
        if not self._num_children.get(name):
            heapq.heappush(self._leaves, (self._keys[name], -self.facts[name].depth, name))

    def _evict(self, used: set[int]) -> bool:
        while self._leaves:
            key, _, name = heapq.heappop(self._leaves)
            if name in used or self._num_children.get(name) or self._keys.get(name) != key:
                continue
            self.floor = max(self.floor, key[0])
            del self.facts[name], self._keys[name]
            self.holders[name] -= 1
            parent = self._parents.pop(name)
            self._num_children[parent] -= 1
            if parent >= 0 and parent not in used:
                self._offer(parent)
            return True
        return False


def lru(cache: ModelCache, name: int) -> Key:
    return (cache.facts[name].last_use,)


def segmented(cache: ModelCache, name: int) -> Key:
    """Evict blocks first that were never found."""
    return (cache.facts[name].num_hits > 0, cache.facts[name].last_use)


def lru_2(cache: ModelCache, name: int) -> Key:
    return (cache.facts[name].use_before, cache.facts[name].last_use)


def lfu_with_ageing(cache: ModelCache, name: int) -> Key:
    return (cache.floor + 1 + cache.facts[name].num_hits, cache.facts[name].last_use)


def gdsf(cache: ModelCache, name: int) -> Key:
    """LFU with ageing, where a block counts by its cost: attention makes a later block dearer."""
    facts = cache.facts[name]
    return (cache.floor + (1 + facts.num_hits) * (1 + facts.depth / 1000), facts.last_use)


def belady(cache: ModelCache, name: int) -> Key:
    return (-cache.facts[name].next_use,)


def copies_first(cache: ModelCache, name: int) -> Key:
    """Evict blocks first that other workers hold too."""
    return (cache.holders[name] == 1, cache.facts[name].last_use)


MODELS: dict[str, Callable[[ModelCache, int], Key]] = {
    "LRU": lru,
    "segmented": segmented,
    "LRU-2": lru_2,
    "LFU, ageing": lfu_with_ageing,
    "GDSF": gdsf,
    "Belady": belady,
}
POLICIES = ("LRU", "odds", "segmented", "LRU-2", "LFU, ageing", "GDSF", "Belady")


def reuse(requests: Sequence[Request], policy: str, num_blocks: int, block_tokens: int) -> float:
    """Return the share of prompt tokens that one cache has."""
    if policy == "odds":
        pool = WorkerCache(num_blocks)
        hits = sum(pool.serve(request, at) for at, request in enumerate(requests))
    else:
        cache = ModelCache(num_blocks, MODELS[policy])
        uses = next_uses(requests) if policy == "Belady" else [()] * len(requests)
        hits = sum(
            cache.serve(request, at, soon)
            for (at, request), soon in zip(enumerate(requests), uses, strict=True)
        )
    return hits * block_tokens / sum(request.prompt_tokens for request in requests)


def next_uses(requests: Sequence[Request]) -> list[Sequence[float]]:
    """Return, for each block of each request, the next request that could find it."""
    following: dict[int, int] = {}
    found: list[Sequence[float]] = []
    for at in reversed(range(len(requests))):
        names = requests[at].names
        found.append([following.get(name, inf) for name in names])
        following.update(dict.fromkeys(names[: requests[at].num_findable], at))
    return found[::-1]


def cluster_reuse(
    requests: Sequence[Request],
    make: Callable[[dict[int, int]], ModelCache | WorkerCache],
    num_workers: int,
    block_tokens: int,
) -> float:
    """Return the reuse of several caches. A request goes where it costs least: its uncached blocks, and those that
    the worker computed for the last requests."""
    holders: dict[int, int] = {}
    caches = [make(holders) for _ in range(num_workers)]
    loads, recent, hits = [0.0] * num_workers, list[tuple[int, int]](), 0
    for at, request in enumerate(requests):
        held = [cache.num_held(request) for cache in caches]
        chosen = min(range(num_workers), key=lambda each: (loads[each] / RECENT * 4 - held[each], each))
        found = caches[chosen].serve(request, at)
        hits += found
        recent.append((chosen, len(request.names) - found))
        loads[chosen] += recent[-1][1]
        if len(recent) > RECENT:
            old, computed = recent.pop(0)
            loads[old] -= computed
    return hits * block_tokens / sum(request.prompt_tokens for request in requests)


def loads(trace: Path | None) -> Iterator[Load]:
    for name, rate, sizes in (
        ("multi-turn", 4.0, (2500, 10_000)),
        ("agents", 0.5, (5000, 10_000)),
        ("shared-prefix", 10.0, (10_000, 20_000)),
        ("uniform-groups", 20.0, (500, 1000)),
    ):
        yield Load(name=name, build=partial(GENERATORS[name], rate, 60.0), block_tokens=32, sizes=sizes)
    if trace is not None:
        yield Load(
            name=trace.stem,
            build=lambda seed: read_trace(trace),
            block_tokens=TRACE_BLOCK_TOKENS,
            sizes=(5000, 10_000, 20_000),
            is_trace=True,
        )


CLUSTERS: dict[str, Callable[[int], Callable[[dict[int, int]], ModelCache | WorkerCache]]] = {
    "LRU": lambda size: lambda holders: ModelCache(size, lru, holders),
    "copies first": lambda size: lambda holders: ModelCache(size, copies_first, holders),
    "odds": lambda size: lambda holders: WorkerCache(size),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Reuse on one load with one size of the cache, as means over the seeds."""

    load: str
    num_blocks: int
    ideal: float
    reuse: dict[str, float]

    @property
    def closed(self) -> float:
        """Share of the distance from LRU to Belady that the worker's policy closes."""
        distance = self.reuse["Belady"] - self.reuse["LRU"]
        return (self.reuse["odds"] - self.reuse["LRU"]) / distance if distance > 1e-9 else 0.0

    def cells(self) -> str:
        shown = [f"{self.reuse[policy]:.3f}" for policy in POLICIES]
        return (
            f"| {self.load} | {self.num_blocks:,} | "
            + " | ".join([*shown, f"{self.closed:.0%}", f"{self.ideal:.3f}"])
            + " |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.placement.eviction")
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's format, beside the generated loads")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows: list[Row] = []
    clusters: dict[str, dict[str, float]] = {}
    for load in loads(options.trace):
        seeds = 1 if load.is_trace else options.seeds
        runs = [requests_of(load.build(seed), load.block_tokens) for seed in range(seeds)]
        for size in load.sizes:
            rows.append(
                Row(
                    load=load.name,
                    num_blocks=size,
                    ideal=fmean(ideal(run, load.block_tokens) for run in runs),
                    reuse={
                        policy: fmean(reuse(run, policy, size, load.block_tokens) for run in runs)
                        for policy in POLICIES
                    },
                )
            )
            print(rows[-1].cells(), flush=True)
        size = load.sizes[-1] // NUM_WORKERS
        clusters[f"{load.name}, {NUM_WORKERS} x {size:,}"] = {
            policy: fmean(cluster_reuse(run, make(size), NUM_WORKERS, load.block_tokens) for run in runs)
            for policy, make in CLUSTERS.items()
        }
        print(clusters, flush=True)
    path = write_report(
        "eviction",
        title="Eviction: reuse by policy, and the distance to Belady's optimum",
        text=_text(rows, clusters),
        figures={"rows": [asdict(row) | {"closed": row.closed} for row in rows], "clusters": clusters},
        floors=[
            Floor(
                name="reuse less LRU's, worst load and size",
                value=min(row.reuse["odds"] - row.reuse["LRU"] for row in rows),
                floor=-0.005,
                better="higher",
            ),
            Floor(
                name="reuse less LRU's, mean",
                value=fmean(row.reuse["odds"] - row.reuse["LRU"] for row in rows),
                floor=0.03,
                better="higher",
            ),
        ],
        versions={},
    )
    print(path)


def _text(rows: Sequence[Row], clusters: dict[str, dict[str, float]]) -> str:
    assert __doc__ is not None
    heading = ["load", "blocks", *POLICIES, "of LRU to Belady", "no limit"]
    policies = list(CLUSTERS)
    lines = [
        __doc__.partition("\n\n")[2].partition("\n\n")[2],
        "| " + " | ".join(heading) + " |",
        "|---" * len(heading) + "|",
        *(row.cells() for row in rows),
        "",
        f"## {NUM_WORKERS} workers",
        "",
        "A request goes to the worker with most of its blocks, unless that one computed many blocks for the last "
        f"{RECENT} requests. `copies first` is LRU, except that blocks which another worker holds go first.",
        "",
        "| load, blocks | " + " | ".join(policies) + " |",
        "|---" * (1 + len(policies)) + "|",
        *(
            f"| {load} | " + " | ".join(f"{found[policy]:.3f}" for policy in policies) + " |"
            for load, found in clusters.items()
        ),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
