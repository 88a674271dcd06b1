"""Study of eviction: the reuse of prompts by policy, beside LRU and Belady's optimum, on caches of several sizes.

    python -m bench.placement.eviction --trace mooncake_conversation.jsonl

Each request finds its longest cached prefix, takes blocks for the rest of its prompt and for its output, and is over
before the next one. No policy may evict a block before its children. `odds` is the worker's own pool and prefix cache.
The other policies are models here: each evicts the leaf with the lowest key.

Belady's optimum evicts the leaf whose next use is farthest. It knows the future, so no policy can reach it.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from pathlib import Path
from statistics import fmean

from blockyard.deploy.bench.workloads.mooncake import TRACE_BLOCK_TOKENS, read_trace
from blockyard.deploy.bench.workloads.requests import Workload

from bench.placement.caches import (
    MODELS,
    ModelCache,
    Request,
    WorkerCache,
    copies_first,
    lru,
    num_leading,
    requests_of,
)
from bench.placement.simulation.workloads import GENERATORS
from bench.reporting import Floor, write_report

RECENT = 64
"""Requests over which the cluster's placement balances its workers."""
NUM_WORKERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    name: str
    build: Callable[[int], Workload]
    block_tokens: int
    sizes: tuple[int, ...]
    """Sizes of the cache, in blocks."""
    is_trace: bool = False


def ideal(requests: Sequence[Request], block_tokens: int) -> float:
    """Return the reuse of a cache without limit."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        hits += num_leading(request, seen)
        seen.update(request.names)
    return hits * block_tokens / sum(request.prompt_tokens for request in requests)


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
