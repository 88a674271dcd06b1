"""Columns: the state of all workers in arrays, and the costs of a request on all of them at once.

Arithmetic over arrays takes microseconds for a thousand workers, where a Candidate and a Score for each take
milliseconds. So a placement finds the few cheapest workers here, and scores only those (scoring.py). The costs are the
same. Does not own the table (cluster/loads.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from blockyard.proto.step_costs import EXCESS_FROM_TOKENS, StepCosts
from blockyard.router.placement.adapters import NO_PRICES, AdapterPrices
from blockyard.router.placement.config import PlacementConfig
from blockyard.router.placement.pulls import LEAST_GAIN, PullSource
from blockyard.router.placement.rates import LEAST_TOKENS_PER_SECOND, MOST_TOKENS_PER_SECOND
from blockyard.router.placement.scoring import Candidate
from numpy.typing import NDArray

Column = NDArray[np.float64]


class Columns(NamedTuple):
    """Facts of all workers that no prompt changes, one array for each fact, with an entry for each worker.

    The fields have the meaning of Candidate's and its Link's, and `slowness` that of WorkerSpeed's. Those of adapters
    are the parts of AdapterPrices.
    """

    queued_prefill_tokens: Column
    queued_pairs: Column
    sequences: Column
    context_tokens: Column
    used_blocks: Column
    total_blocks: Column
    block_size: Column
    host_tokens_per_second: Column
    pull_setup_ms: Column
    pull_bytes_per_ms: Column
    token_bytes: Column
    pulling_bytes: Column
    step_ms: Column
    adapter_load_ms: Column
    adapter_eviction_ms: Column
    kind: Column
    slowness: Column


def row_of(candidate: Candidate, slowness: float, prices: AdapterPrices = NO_PRICES) -> tuple[float, ...]:
    """Return a worker's entries of the columns."""
    return (
        candidate.queued_prefill_tokens,
        candidate.queued_pairs,
        candidate.sequences,
        candidate.context_tokens,
        candidate.used_blocks,
        candidate.total_blocks,
        candidate.block_size,
        candidate.host_tokens_per_second,
        *candidate.link,
        *prices,
        candidate.kind,
        slowness,
    )


def are_measured(values: Column) -> NDArray[np.bool_]:
    """Return which rates or times are valid, as `rates.is_measured` does."""
    return (values >= LEAST_TOKENS_PER_SECOND) & (values <= MOST_TOKENS_PER_SECOND)


def costs_of(
    prompt_tokens: int,
    on_gpu_blocks: Column,
    anywhere_blocks: Column,
    *,
    workers: Columns,
    costs: StepCosts,
    config: PlacementConfig,
    sources: Sequence[PullSource] = (),
    adapter_ms: Column | None = None,
) -> Column:
    """Return total_ms of a prompt on each worker, by the blocks of it that each has cached.

    `costs` are those of a machine whose slowness is 1. Each worker fetches what it lacks from one of the `sources` of
    its kind, if its link is measured and that pays (PullPlan.pays). `adapter_ms` is that of each worker, if the request
    names an adapter.
    """

    block_size = workers.block_size
    reusable = (prompt_tokens - 1) // block_size * block_size
    cached = np.minimum(on_gpu_blocks * block_size, reusable)
    host_cached = np.minimum(np.maximum(anywhere_blocks, on_gpu_blocks) * block_size, reusable) - cached
    own_rate = costs.tokens_per_second / workers.slowness
    host_rate = workers.host_tokens_per_second
    per_ms = np.where(are_measured(own_rate), own_rate, config.assumed_prefill_tokens_per_second) / 1000
    needed = np.maximum(prompt_tokens - cached, 0)
    has_host = are_measured(host_rate)
    host_tokens = np.where(has_host, np.minimum(host_cached, needed), 0)
    computed = needed - host_tokens
    computed_ms = _computing_ms(computed, prompt_tokens, per_ms, costs)
    queue_ms = (workers.queued_prefill_tokens + costs.pair_tokens * workers.queued_pairs) / per_ms
    memory_ms = config.memory_full_ms * np.minimum(np.maximum(_shortage(needed, workers, config), 0), 1)
    total_ms: Column = (
        queue_ms
        + config.context_fraction * workers.context_tokens / per_ms
        + _decode_step_ms(workers, costs, config)
        + (config.later_fraction + config.others_fraction * workers.sequences) * computed_ms
        + memory_ms
        + computed_ms
        + 1000 * host_tokens / np.where(has_host, host_rate, 1)
    )
    if adapter_ms is not None:
        total_ms += adapter_ms
    if not sources:
        return total_ms
    most_ms = np.zeros_like(total_ms)
    tie_ms = np.maximum(config.near_equal_ms, config.near_equal_fraction * total_ms)
    can_pull = has_host & are_measured(workers.pull_bytes_per_ms) & (memory_ms == 0)
    for source in sources:
        pulled = np.minimum(source.cached_tokens - cached, needed) - host_tokens
        at = np.flatnonzero(can_pull & (pulled > 0) & (workers.kind == source.kind))
        pulled = pulled[at]
        moved = pulled * workers.token_bytes[at] + workers.pulling_bytes[at] + source.lending_bytes
        time_ms = np.maximum(workers.pull_setup_ms[at], (workers.step_ms[at] + source.step_ms) / 2)
        time_ms += moved / workers.pull_bytes_per_ms[at]
        left_ms = _computing_ms(computed[at] - pulled, prompt_tokens, per_ms[at], costs)
        saved_ms = computed_ms[at] - left_ms - np.maximum(time_ms - queue_ms[at], 0)
        saved_ms -= 1000 * pulled / host_rate[at]
        pays = saved_ms > np.maximum(tie_ms[at], LEAST_GAIN * time_ms)
        most_ms[at] = np.where(pays, np.maximum(most_ms[at], saved_ms), most_ms[at])
    return total_ms - most_ms


def _computing_ms(tokens: Column, prompt_tokens: int, per_ms: Column, costs: StepCosts) -> Column:
    """Return the time to compute the last tokens of a prompt."""
    pairs = tokens * (2 * prompt_tokens - tokens) // 2
    time_ms: Column = (tokens + costs.pair_tokens * pairs) / per_ms
    return time_ms


def _decode_step_ms(workers: Columns, costs: StepCosts, config: PlacementConfig) -> Column:
    """Return the price of the present sequences' decode steps, as StepCosts.decode_seconds and scoring.py have it."""
    sequences = workers.sequences
    step, _, _, excess, decode, context, _ = costs.costs
    seconds = step + decode * sequences + context * workers.context_tokens
    seconds += excess * np.maximum(sequences - EXCESS_FROM_TOKENS, 0)
    step_ms = 1000 * workers.slowness * seconds
    return np.where(
        are_measured(step_ms) & (sequences > 0),
        config.decode_step_fraction * step_ms,
        config.decode_ms_per_sequence * sequences,
    )


def _shortage(needed_tokens: Column, workers: Columns, config: PlacementConfig) -> Column:
    """Return the part of the price of memory that each worker has, before its bounds 0 and 1."""
    needed_blocks = -(-needed_tokens // workers.block_size)
    total = np.maximum(workers.total_blocks, 1)
    free_fraction = 1 - (workers.used_blocks + needed_blocks) / total
    shortage = (config.memory_free_fraction - free_fraction) / config.memory_free_fraction
    return np.where(workers.total_blocks > 0, shortage, 0)
