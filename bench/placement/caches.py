"""Caches of the study of eviction: the worker's own, and models of other policies, served with named requests.

Own what a request finds, stores and evicts. Do not own the loads, nor what is compared (eviction.py).
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from blockyard.deploy.bench.workloads.requests import PlannedRequest, Run, Workload
from blockyard.worker.cache.block_pool import BlockPool
from blockyard.worker.cache.pauses import NOT_PAUSED, bucket_of
from blockyard.worker.cache.prefix_cache import PrefixCache
from blockyard.worker.sequences.identifiers import BlockName

OUTPUT_TOKENS_PER_SECOND = 50.0
"""Pace of outputs, which decides when a conversation's next request comes."""
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


def num_leading(request: Request, cached: Any) -> int:
    """Return how many leading blocks of a request are in `cached`."""
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
        found, used = num_leading(request, self.facts), set(request.names)
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
        return num_leading(request, self.facts)

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
