"""Every setting of placement, with its unit, in one frozen value. What they mean is in placement.py."""

from dataclasses import dataclass
from typing import Literal

PolicyName = Literal["prefix", "round_robin", "least_loaded", "two_choices", "session", "dynamo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """Prices of the terms. They need not be exact: only the order of workers counts."""

    assumed_prefill_tokens_per_second: float = 2_000.0
    """Before any worker has measured its own; then the median of the measured ones stands in."""
    decode_ms_per_sequence: float = 4.0
    """Price of each sequence on a worker that has not measured how fast it decodes."""
    decode_step_fraction: float = 0.5
    """Price of each sequence on a worker that has, as a part of the time that its token takes there: a prompt
    finds a step half done on average."""
    memory_free_fraction: float = 0.1
    """With less than this part of the pool free (or cached, which is as good), memory begins to cost."""
    memory_full_ms: float = 2_000.0
    """Price of a pool that cannot hold the request at all: it waits or pushes someone out."""
    near_equal_ms: float = 1.0
    """Costs closer than this are a tie: a random choice among them keeps routers from moving in step."""
    near_equal_fraction: float = 0.02
    """... or closer than this part of the least cost: estimates are no better."""
    loaded_ms: float = 250.0
    """Without the index: a worker whose own load costs more than this is loaded."""
