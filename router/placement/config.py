"""Every setting of placement, with its unit, in one frozen value. What they mean is in scoring.py and policies.py."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isfinite
from typing import Literal

PolicyName = Literal["prefix", "round_robin", "least_loaded", "two_choices", "session", "dynamo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """Prices of the terms, and bounds. Prices need not be exact: only the order of workers counts. Raises ValueError
    for bad values."""

    assumed_prefill_tokens_per_second: float = 2_000.0
    """Before any worker has measured its own; then the median of the measured ones stands in."""
    decode_ms_per_sequence: float = 4.0
    """Price of each sequence on a worker that has not measured how fast it decodes."""
    decode_step_fraction: float = 0.5
    """Price of each sequence on a worker that has, as a part of the time that its token takes there: a prompt
    finds a step half done on average."""
    context_fraction: float = 0.07
    """Price of the tokens that every decode step on a worker reads, as a part of the time that computing them would
    take."""
    others_fraction: float = 0.1
    """Price of the time that this prompt's prefill takes from each sequence that is there, as a part of that time. 0
    counts the request's own time alone, 1 everybody's alike."""
    rate_half_life_seconds: float = 30.0
    """A measured rate is believed for so long without another; then it fades, by half in each further such time, into
    the median of the workers'. 0: never."""
    memory_free_fraction: float = 0.1
    """With less than this part of the pool free (or cached, which is as good), memory begins to cost."""
    memory_full_ms: float = 2_000.0
    """Price of a pool that cannot hold the request at all: it waits or pushes someone out."""
    near_equal_ms: float = 1.0
    """Costs closer than this are a tie: a random choice among them keeps routers from moving in step."""
    near_equal_fraction: float = 0.02
    """... or closer than this part of the least cost: estimates are no better."""
    loaded_ms: float = 250.0
    """A worker whose own load costs more than this is loaded: no hashing of prefixes or sessions sends to it."""
    rendezvous_tokens: int = 64
    """Without the index, prompts that agree in so many tokens are kept together."""
    remembered_sessions: int = 65_536
    """A router remembers the last workers of so many sessions, those used last."""
    stored_grace_seconds: float = 1.0
    """How long a speculative prefix outlives the worker's first token: the index has it after some 20 ms."""
    prefix_homes: int = 2
    """Workers that serve a prefix without the index: one alone could not take what comes while it is loaded."""
    reconsider_seconds: float = 0.25
    """Who is first in a worker's line looks that often whether another worker has become cheaper."""
    stale_lookup_seconds: float = 1.0
    """What the index said is asked again by who waits for longer."""
    hopeless_factor: float = 2.0
    """A request is refused at once where its first token is expected later than its deadline by this factor: work that
    nobody waits for helps nobody. 0: never."""
    max_unstarted: int = 32
    """Requests of one router that one worker may have without a first token: more wait in the router's line, where
    they can still go elsewhere. It bounds how many are on their way before a BUSY can be heard."""
    dynamo_overlap_score_weight: float = 1.0
    """Of `dynamo`: what a block to be computed costs beside a block in use."""
    dynamo_temperature: float = 0.0
    """Of `dynamo`: 0 takes the least cost, more makes the choice more random."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if not isfinite(value) or value < 0:
                raise ValueError(f"placement: {setting.name} must be a number from 0 on, not {value}")
        for name in ("assumed_prefill_tokens_per_second", "memory_free_fraction"):
            if getattr(self, name) == 0:
                raise ValueError(f"placement: {name} must be above 0")
        for name in ("rendezvous_tokens", "remembered_sessions", "max_unstarted", "prefix_homes"):
            if getattr(self, name) < 1:
                raise ValueError(f"placement: {name} must be at least 1, not {getattr(self, name)}")
        if self.memory_free_fraction > 1:
            raise ValueError(
                f"placement: memory_free_fraction must be at most 1, not {self.memory_free_fraction}"
            )


def parse_placement(pairs: Sequence[str]) -> PlacementConfig:
    """Settings given as "name=value", the others by default. Raises ValueError that says what is wrong with which."""
    defaults = PlacementConfig()
    kinds: dict[str, type[float]] = {
        setting.name: type(getattr(defaults, setting.name)) for setting in fields(defaults)
    }
    values: dict[str, float] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"placement: {pair!r} is not NAME=VALUE, such as near_equal_ms=2")
        if name not in kinds:
            raise ValueError(f"placement: {pair!r} sets none of {', '.join(kinds)}")
        if name in values:
            raise ValueError(f"placement: {name} is given twice")
        try:
            values[name] = kinds[name](text)
        except ValueError:
            kind = "a whole number" if kinds[name] is int else "a number"
            raise ValueError(f"placement: {name} must be {kind}, not {text!r}") from None
    return PlacementConfig(**values)  # type: ignore[arg-type]
