"""Loads of the benchmark of the whole path, by the generators of `blockyard bench`. Pure and deterministic by seed.

sglang-router takes text alone, so lengths of prompts are in words. The demo's tokenizer, which the shapes have too,
makes TOKENS_A_WORD of each. Each system gets other words of the same number, so that servers that two systems share
cache nothing for the second.
"""

from collections.abc import Callable
from dataclasses import dataclass

from blockyard.deploy.bench.workloads import plans
from blockyard.deploy.bench.workloads.conversations import Conversation
from blockyard.deploy.bench.workloads.lengths import parse_lengths
from blockyard.deploy.bench.workloads.requests import Workload

TOKENS_A_WORD = 2
CHAT = Conversation(
    num_systems=4,
    system_tokens=256 // TOKENS_A_WORD,
    num_turns=(2, 4),
    first_tokens=(8, 32),
    turn_tokens=(8, 32),
    output_tokens=(16, 48),
    pause_seconds=0.5,
)
PREFIX = parse_lengths(str(512 // TOKENS_A_WORD))
QUESTION = parse_lengths("8-32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load, and how it is sent."""

    make: Callable[[int], Workload]
    """Makes the workload of a seed."""
    concurrency: int | None
    """Sessions at once. None sends each request at its own time."""


def shared_prefix(seed: int) -> Workload:
    return plans.shared_prefix(
        plans.at_once(),
        seed,
        num_groups=8,
        num_followers=7,
        prefix=PREFIX,
        question=QUESTION,
        output=parse_lengths("32"),
    )


def chat(seed: int) -> Workload:
    return plans.chats(plans.at_once(), seed, num_sessions=16, kind=CHAT)


def mixed(seed: int) -> Workload:
    return plans.random_prompts(
        plans.at_once(),
        seed,
        num_requests=32,
        prompt=parse_lengths("10-200"),
        output=parse_lengths("16-96"),
    )


def steady(seed: int) -> Workload:
    return plans.shared_prefix(
        plans.at_rate(1.0, seed),
        seed,
        num_groups=4,
        num_followers=6,
        prefix=PREFIX,
        question=QUESTION,
        output=parse_lengths("32"),
    )


def large(seed: int) -> Workload:
    return plans.shared_prefix(
        plans.at_once(),
        seed,
        num_groups=16,
        num_followers=15,
        prefix=parse_lengths(str(1024 // TOKENS_A_WORD)),
        question=parse_lengths("16-64"),
        output=parse_lengths("256"),
    )


def quick(seed: int) -> Workload:
    return plans.shared_prefix(
        plans.at_once(),
        seed,
        num_groups=2,
        num_followers=3,
        prefix=parse_lengths("32"),
        question=parse_lengths("4"),
        output=parse_lengths("8"),
    )


LOADS = {
    "shared-prefix": Load(make=shared_prefix, concurrency=64),
    "chat": Load(make=chat, concurrency=16),
    "mixed": Load(make=mixed, concurrency=32),
    "one-a-second": Load(make=steady, concurrency=None),
    "large": Load(make=large, concurrency=256),
    "quick": Load(make=quick, concurrency=8),
}
"""Loads by name. `shared-prefix` is 64 requests at once in 8 groups. `large` is for GPUs: 256 in 16 groups."""
