"""Shortlist: the few workers that may be the best for a prompt, found by columns over the table of loads.

Scoring one worker exactly costs more than pricing a thousand by columns. So a placement prices all of them here, and
scores only these few (placement/scoring.py). Pure. Does not own the rows (loads.py) or the workers' state
(known_workers.py).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
from blockyard.proto.index.contract import WorkerId
from blockyard.proto.index.holders import Numbers
from blockyard.proto.step_costs import StepCosts
from blockyard.router.cluster.depths import CachedDepth
from blockyard.router.cluster.loads import LoadTable
from blockyard.router.placement.adapters import NOT_SERVED_MS, Adapter, load_ms
from blockyard.router.placement.columns import Column, costs_of
from blockyard.router.placement.config import PlacementConfig
from blockyard.router.placement.pulls import PullSource
from blockyard.router.placement.scoring import tie_ms
from numpy.typing import NDArray

SHORTLIST = 8
"""Workers that are scored for a request. The table of loads says which, if there are more than twice as many."""
MAX_EXPECTING = 32
"""Most workers that are asked for their speculative prefix of a prompt, those with the least possible cost."""


def shortlist(
    names: Sequence[bytes],
    prompt_tokens: int,
    depths: Mapping[WorkerId, CachedDepth],
    arrived: Mapping[str, int],
    *,
    table: LoadTable,
    slots: Numbers,
    expecting: Iterable[str],
    expected_blocks: Callable[[str], int],
    costs: StepCosts,
    config: PlacementConfig,
    key: bytes,
    favourite: WorkerId | None,
    most: int,
    sources: Sequence[PullSource] = (),
    adapter: Adapter | None = None,
    lacking: Iterable[str] = (),
) -> list[str]:
    """Return the addresses of `most` of the workers at these slots, and of the `favourite`.

    The one of least cost is among them. If too many are near-equal, the `key` says which, on every router alike.
    `depths` holds what workers have cached according to the index, `arrived` what has just reached them. `expecting`
    are the workers that may expect some of these blocks, and `expected_blocks` says how many. All may fetch blocks from
    one of the `sources`. `lacking` are workers that cannot load the request's `adapter`.
    """
    on_gpu, anywhere = table.depths(depths)
    for address, blocks in arrived.items():
        if (slot := table.slots.get(address)) is not None:
            on_gpu[slot] = max(on_gpu[slot], blocks)
    on_gpu, anywhere = on_gpu[slots], anywhere[slots]
    adapter_ms = None if adapter is None else _adapter_ms(adapter, lacking, table, slots)
    price = partial(
        costs_of,
        prompt_tokens,
        workers=table.columns(slots),
        costs=costs,
        config=config,
        adapter_ms=adapter_ms,
    )
    expects = np.zeros(len(table), np.bool_)
    expects[[table.slots[where] for where in expecting if where in table.slots]] = True
    positions = np.flatnonzero(expects[slots])
    if len(positions) > MAX_EXPECTING:
        least = price(np.full(len(slots), float(len(names))), anywhere)
        positions = positions[np.argsort(least[positions])[:MAX_EXPECTING]]
    for position in positions.tolist():
        on_gpu[position] = max(on_gpu[position], expected_blocks(table.addresses[slots[position]]))
    found = price(on_gpu, anywhere, sources=sources)
    near = float(found.min())
    near += tie_ms(near, config)
    drawn = _cheapest(found, lambda ties: table.ranks(key, slots[ties]), near=near, most=most)
    chosen = set(slots[drawn].tolist())
    if favourite is not None:
        chosen.update(slot for slot in table.of_worker(favourite) if slot in slots)
    return [table.addresses[slot] for slot in sorted(chosen)]


def _adapter_ms(adapter: Adapter, lacking: Iterable[str], table: LoadTable, slots: Numbers) -> Column:
    """Return the cost of the adapter on each worker, as `adapter_ms` of placement/adapters.py does."""
    workers = table.columns(slots)
    guess_ms = load_ms(0.0, adapter.num_bytes)
    cost_ms: Column = np.where(workers.adapter_load_ms > 0, workers.adapter_load_ms, guess_ms)
    cost_ms = cost_ms + workers.adapter_eviction_ms
    by_slot = np.zeros(len(table))
    by_slot[slots] = cost_ms
    by_slot[[table.slots[address] for address in table.with_adapter(adapter.fingerprint)]] = 0.0
    by_slot[[table.slots[address] for address in lacking if address in table.slots]] = NOT_SERVED_MS
    return by_slot[slots]


def _cheapest(
    costs: Column, ranks: Callable[[Numbers], NDArray[np.uint64]], *, near: float, most: int
) -> Numbers:
    """Return the positions of the `most` least costs. Of more within `near`, return the least and those of the lowest
    `ranks`, which maps positions to ranks."""
    if len(costs) <= most:
        return np.arange(len(costs))
    ties = np.flatnonzero(costs <= near)
    if len(ties) <= most:
        return np.argpartition(costs, most - 1)[:most]
    drawn = ties[np.argpartition(ranks(ties), most - 2)[: most - 1]]
    return np.union1d(drawn, [np.argmin(costs)])
