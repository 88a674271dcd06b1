"""Columns: the state of all workers in arrays, and the costs of a request on all of them at once.

Arithmetic over arrays takes microseconds for a thousand workers, where a Candidate and a Score for each take
milliseconds. So a placement finds the few cheapest workers here, and scores only those (scoring.py). The costs are the
same, except that a rate may be as old as the worker's last report. Does not own the table (cluster/loads.py).
"""

from typing import NamedTuple

import numpy as np
from blockyard.router.placement.config import PlacementConfig
from blockyard.router.placement.rates import LEAST_TOKENS_PER_SECOND
from blockyard.router.placement.scoring import Candidate
from numpy.typing import NDArray

Column = NDArray[np.float64]


class Columns(NamedTuple):
    """Fields of Candidate that no prompt changes, one array each, with an entry for each worker."""

    queued_prefill_tokens: Column
    sequences: Column
    context_tokens: Column
    used_blocks: Column
    total_blocks: Column
    block_size: Column
    prefill_tokens_per_second: Column
    decode_tokens_per_second: Column
    host_tokens_per_second: Column


def row_of(candidate: Candidate) -> tuple[float, ...]:
    """Return a worker's entries of the columns."""
    return (
        candidate.queued_prefill_tokens,
        candidate.sequences,
        candidate.context_tokens,
        candidate.used_blocks,
        candidate.total_blocks,
        candidate.block_size,
        candidate.prefill_tokens_per_second,
        candidate.decode_tokens_per_second,
        candidate.host_tokens_per_second,
    )


def are_measured(rates: Column) -> NDArray[np.bool_]:
    """Return which rates are valid, as `rates.is_measured` does."""
    return np.isfinite(rates) & (rates >= LEAST_TOKENS_PER_SECOND)


def typical_of(rates: Column) -> float:
    """Return the median of the measured rates, or 0 if there are none, as `rates.typical` does."""
    measured = rates[are_measured(rates)]
    if not measured.size:
        return 0.0
    middle = measured.size // 2
    low, high = middle - 1 + measured.size % 2, middle
    parted = np.partition(measured, (low, high))
    return float(parted[low] + parted[high]) / 2


def costs_of(
    prompt_tokens: int,
    on_gpu_blocks: Column,
    anywhere_blocks: Column,
    *,
    workers: Columns,
    typical_rate: float,
    config: PlacementConfig,
) -> Column:
    """Return total_ms of a prompt on each worker, by the blocks of it that each has cached."""
    block_size = workers.block_size
    reusable = (prompt_tokens - 1) // block_size * block_size
    cached = np.minimum(on_gpu_blocks * block_size, reusable)
    host_cached = np.minimum(np.maximum(anywhere_blocks, on_gpu_blocks) * block_size, reusable) - cached
    own_rate, decode_rate = workers.prefill_tokens_per_second, workers.decode_tokens_per_second
    host_rate = workers.host_tokens_per_second
    per_ms = np.where(are_measured(own_rate), own_rate, typical_rate) / 1000
    needed = np.maximum(prompt_tokens - cached, 0)
    has_host = are_measured(host_rate)
    host_tokens = np.where(has_host, np.minimum(host_cached, needed), 0)
    prefill_ms = (needed - host_tokens) / per_ms
    sequence_ms = np.where(
        decodes := are_measured(decode_rate),
        config.decode_step_fraction * 1000 / np.where(decodes, decode_rate, 1),
        config.decode_ms_per_sequence,
    )
    shortage = _shortage(needed, workers, config)
    total_ms: Column = (
        (workers.queued_prefill_tokens + config.context_fraction * workers.context_tokens) / per_ms
        + workers.sequences * (sequence_ms + config.others_fraction * prefill_ms)
        + config.memory_full_ms * np.minimum(np.maximum(shortage, 0), 1)
        + prefill_ms
        + 1000 * host_tokens / np.where(has_host, host_rate, 1)
    )
    return total_ms


def _shortage(needed_tokens: Column, workers: Columns, config: PlacementConfig) -> Column:
    """Return the part of the price of memory that each worker has, before its bounds 0 and 1."""
    needed_blocks = -(-needed_tokens // workers.block_size)
    total = np.maximum(workers.total_blocks, 1)
    free_fraction = 1 - (workers.used_blocks + needed_blocks) / total
    shortage = (config.memory_free_fraction - free_fraction) / config.memory_free_fraction
    return np.where(workers.total_blocks > 0, shortage, 0)
