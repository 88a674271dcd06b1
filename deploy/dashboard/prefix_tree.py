"""Builds the tree of cached prefixes from the blocks of all pools, for the live page. Pure.

A run is a chain of blocks without branches that the same workers hold. Blocks are known by name only. No text or token
of a prompt is here.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from blockyard.proto.v1 import cluster_pb2

MAX_RUNS = 60
"""Limit on the runs that the page shows."""
MAX_BLOCKS = 50_000
"""Limit on the blocks of one worker that are read for a tree."""


@dataclass(slots=True)
class _Node:
    """One block name, with all workers that hold it and the number of sequences that use it there."""

    parent: bytes
    holders: set[str] = field(default_factory=set)
    sequences: int = 0
    age_seconds: float = float("inf")


@dataclass(slots=True, kw_only=True)
class _Run:
    """A run of blocks. `first_block` counts the blocks before it in the prefix, `level` the runs before it.

    `blocks_below` counts its own blocks too. `children` are the first blocks of the runs that continue it.
    """

    names: list[bytes]
    first_block: int
    level: int
    workers: list[str]
    sequences: int
    children: list[bytes]
    blocks_below: int = 0
    newest_age_seconds: float = 0.0
    shown: list["_Run"] = field(default_factory=list)

    @property
    def heat(self) -> tuple[int, int]:
        """Return the key for sorting: the sequences, then the blocks of the run and below. More is hotter."""
        return self.sequences, self.blocks_below


def prefix_tree(pools: Mapping[str, Iterable[cluster_pb2.Block] | None]) -> dict[str, Any]:
    """Return the MAX_RUNS hottest runs of the tree, each after its parent, and counts of the whole tree.

    `pools` is each worker's blocks, or None for a worker that does not answer.
    """
    nodes = _nodes(pools)
    children: dict[bytes, list[bytes]] = defaultdict(list)
    for name, node in nodes.items():
        children[node.parent if node.parent in nodes else b""].append(name)
    totals = _totals(nodes, children)
    numbers, ready, roots = count(), list[tuple[tuple[int, int], int, _Run, list[_Run]]](), list[_Run]()

    def offer(names: Sequence[bytes], first_block: int, level: int, siblings: list[_Run]) -> None:
        for name in names:
            run = _run_from(name, nodes, children, first_block=first_block, level=level)
            run.blocks_below, run.newest_age_seconds = totals[name]
            sequences, blocks = run.heat
            heapq.heappush(ready, ((-sequences, -blocks), next(numbers), run, siblings))

    offer(children.get(b"", ()), 0, 0, roots)
    num_shown = 0
    while ready and num_shown < MAX_RUNS:
        _, _, run, siblings = heapq.heappop(ready)
        siblings.append(run)
        num_shown += 1
        offer(run.children, run.first_block + len(run.names), run.level + 1, run.shown)
    return {
        "prefixes": len(children.get(b"", ())),
        "blocks": len(nodes),
        "hidden": len(ready),
        "silent": sorted(worker for worker, blocks in pools.items() if blocks is None),
        "runs": [_as_dict(run) for run in _in_order(roots)],
    }


def _nodes(pools: Mapping[str, Iterable[cluster_pb2.Block] | None]) -> dict[bytes, _Node]:
    nodes: dict[bytes, _Node] = {}
    for worker, blocks in pools.items():
        for block in blocks or ():
            if block.name:
                node = nodes.setdefault(block.name, _Node(parent=block.parent))
                node.sequences += block.references if worker not in node.holders else 0
                node.holders.add(worker)
                node.age_seconds = min(node.age_seconds, block.age_seconds)
    return nodes


def _totals(
    nodes: Mapping[bytes, _Node], children: Mapping[bytes, list[bytes]]
) -> dict[bytes, tuple[int, float]]:
    """Return, by name, the number of blocks in its subtree, and the age of the newest of them."""
    order = list(children.get(b"", ()))
    for name in order:  # The list grows meanwhile. Parents come before their children.
        order += children.get(name, ())
    totals: dict[bytes, tuple[int, float]] = {}
    for name in reversed(order):
        below = [totals[child] for child in children.get(name, ())]
        ages = (nodes[name].age_seconds, *(age for _, age in below))
        totals[name] = (1 + sum(blocks for blocks, _ in below), min(ages))
    return totals


def _run_from(
    name: bytes,
    nodes: Mapping[bytes, _Node],
    children: Mapping[bytes, list[bytes]],
    *,
    first_block: int,
    level: int,
) -> _Run:
    first, names = nodes[name], [name]
    while len(following := children.get(names[-1], [])) == 1 and nodes[following[0]].holders == first.holders:
        names.append(following[0])
    return _Run(
        names=names,
        first_block=first_block,
        level=level,
        workers=sorted(first.holders),
        sequences=first.sequences,
        children=following,
    )


def _in_order(runs: Iterable[_Run]) -> Iterator[_Run]:
    waiting = list(runs)[::-1]
    while waiting:
        run = waiting.pop()
        yield run
        waiting += run.shown[::-1]


def _as_dict(run: _Run) -> dict[str, Any]:
    return {
        "level": run.level,
        "name": run.names[0].hex(),
        "first_block": run.first_block,
        "blocks": len(run.names),
        "blocks_below": run.blocks_below - len(run.names),
        "workers": run.workers,
        "sequences": run.sequences,
        "age_seconds": round(run.newest_age_seconds, 1),
    }
