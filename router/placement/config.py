"""Every setting of placement, with its unit, in one frozen value.

A field is a setting of `--placement NAME=VALUE` (proto/runtime/settings.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from blockyard.proto.runtime.settings import check_settings, setting, setting_fields

PolicyName = Literal["prefix", "round_robin", "least_loaded", "two_choices", "session", "dynamo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """Settings of placement: the weight of each term in a worker's cost, limits, and how long reports are trusted.

    Weights need not be exact: only the order of the workers by cost counts. Raises ValueError for bad values.
    """

    assumed_prefill_tokens_per_second: float = setting(
        2_000.0,
        help="Prefill rate of every worker until one has measured steps.",
        above=0,
        below=inf,
    )
    decode_ms_per_sequence: float = setting(
        4.0,
        help="Price of each sequence on a worker until one has measured steps.",
        minimum=0,
        below=inf,
    )
    decode_step_fraction: float = setting(
        0.5,
        help="Price of a worker's sequences, as a part of a step that decodes them. A prompt finds a step half done "
        "on average.",
        minimum=0,
        below=inf,
    )
    context_fraction: float = setting(
        0.07,
        help="Price of the tokens that every decode step of a worker reads, as a part of the time to compute them.",
        minimum=0,
        below=inf,
    )
    others_fraction: float = setting(
        0.1,
        help="Price of the time that this prefill takes from each running sequence, as a part of that time. 0 counts "
        "only the request's own time, 1 counts all times equally.",
        minimum=0,
        below=inf,
    )
    later_fraction: float = setting(
        0.2,
        help="Price of the time that this prefill takes from later requests, as a part of that time. It keeps a burst "
        "from computing a prefix on several workers at once.",
        minimum=0,
        below=inf,
    )
    rate_half_life_seconds: float = setting(
        30.0,
        help="The measured slowness of a worker is valid for this time. After that it decays to the median of the "
        "workers, by half in each further such time. 0: never.",
        minimum=0,
        below=inf,
    )
    memory_free_fraction: float = setting(
        0.1,
        help="Memory has a price when less than this part of the pool is free or cached.",
        above=0,
        maximum=1,
    )
    memory_full_ms: float = setting(
        2_000.0,
        help="Price of a pool that cannot hold the request, which must wait or preempt another.",
        minimum=0,
        below=inf,
    )
    near_equal_ms: float = setting(
        1.0,
        help="Costs closer than this are a tie. All routers choose alike among ties, by a hash of the uncached prefix.",
        minimum=0,
        below=inf,
    )
    near_equal_fraction: float = setting(
        0.02,
        help="Costs closer than this part of the least cost are a tie too: estimates are no more exact.",
        minimum=0,
        below=inf,
    )
    loaded_ms: float = setting(
        250.0,
        help="A worker whose load costs more than this is loaded: prefix and session hashing do not choose it.",
        minimum=0,
        below=inf,
    )
    rendezvous_tokens: int = setting(
        64,
        help="Without the index, prompts that agree in this many tokens are kept together.",
        minimum=1,
        below=inf,
    )
    remembered_sessions: int = setting(
        65_536,
        help="Sessions, the most recently used, whose last worker a router remembers.",
        minimum=1,
        below=inf,
    )
    stored_grace_seconds: float = setting(
        1.0,
        help="Time that a speculative prefix stays after the worker's first token. The index has it after about 20 ms.",
        minimum=0,
        below=inf,
    )
    prefix_homes: int = setting(
        2,
        help="Workers that serve a prefix without the index. A single one could not serve the rest while it is loaded.",
        minimum=1,
        below=inf,
    )
    reconsider_seconds: float = setting(
        0.25,
        help="Interval at which the first request in a worker's line looks for a cheaper worker.",
        minimum=0,
        below=inf,
    )
    stale_lookup_seconds: float = setting(
        1.0,
        help="A request that waits longer than this looks up its prefix in the index again.",
        minimum=0,
        below=inf,
    )
    hopeless_factor: float = setting(
        2.0,
        help="A request is refused at once if its first token is expected later than its deadline times this factor. "
        "0: never.",
        minimum=0,
        below=inf,
    )
    max_unstarted: int = setting(
        32,
        help="Maximum requests of one router that one worker may have without a first token. More wait in the router, "
        "where they can still go to another worker.",
        minimum=1,
        below=inf,
    )
    dynamo_overlap_score_weight: float = setting(
        1.0,
        help="Policy `dynamo`: price of a block to compute, relative to a block in use.",
        minimum=0,
        below=inf,
    )
    dynamo_temperature: float = setting(
        0.0,
        help="Policy `dynamo`: 0 takes the least cost; higher values make the choice more random.",
        minimum=0,
        below=inf,
    )

    def __post_init__(self) -> None:
        check_settings(self, prefix="placement: ")


def parse_placement(pairs: Sequence[str]) -> PlacementConfig:
    """Return the settings given as "name=value", with defaults for the others. Raises ValueError for a wrong pair."""
    kinds = {member.name: member.kind for member in setting_fields(PlacementConfig)}
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
