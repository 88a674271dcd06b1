"""Weather of a storm (storm.py): schedulers of several kinds, random requests, and actions in any order."""

import random
from collections.abc import Callable
from typing import Any

from .storm import Storm
from .storm_device import STOP_TOKENS, digests, follow, token_after

SHARED = [5 + index % 9 for index in range(200)]
_SWAPS = {"preemption": "swap", "swap_blocks": 40}
WEATHERS: dict[str, dict[str, Any]] = {
    "recompute, a step at a time": {
        "num_blocks": 12,
        "pipelined": False,
        "preemption": "recompute",
        "drafts": True,
    },
    "swap, a step ahead": {"num_blocks": 11, "pipelined": True, "preemption": "swap", "swap_blocks": 24},
    "drafts, a step ahead": _SWAPS
    | {"num_blocks": 20, "pipelined": True, "drafts": True, "block_size": 8, "host_cache_blocks": 12},
    "a draft model, a step ahead": _SWAPS
    | {"num_blocks": 20, "pipelined": True, "draft_model": True, "host_cache_blocks": 12},
    "both, host cache, a step ahead": {
        "num_blocks": 10,
        "pipelined": True,
        "preemption": "auto",
        "swap_blocks": 10,
        "host_cache_blocks": 12,
        "max_num_batched_tokens": 48,
    },
    "small blocks, host cache, a step at a time": {
        "num_blocks": 42,
        "pipelined": False,
        "preemption": "auto",
        "block_size": 4,
        "swap_blocks": 30,
        "host_cache_blocks": 25,
        "protected_blocks": 4,
        "max_preemptions": 1,
    },
    "prefixes that come back from host memory": _SWAPS
    | {
        "num_blocks": 24,
        "pipelined": True,
        "host_cache_blocks": 60,
        "block_size": 8,
        "max_num_batched_tokens": 64,
    },
}


def random_request(chance: random.Random) -> dict[str, Any]:
    """Return a random request: few prefixes, often several outputs or beams, sometimes a replay or an embedding."""
    shared = SHARED[: chance.choice([0, 8, 16, 48, 64])]
    tokens = [*shared, *(chance.randint(1, 4) for _ in range(chance.randint(1, 40)))]
    request: dict[str, Any] = {
        "tokens": tokens,
        "max_tokens": chance.randint(1, 40),
        "priority": chance.choice([0, 0, 0, 3, -2, 99, 100, 100]),
        "waited": chance.choice([0, 0, 0, 98, 101]),
        "tenant": len(tokens) % 4,
        "pulled": chance.choice([0, 0, 3, 9]),
        "may_move": chance.random() < 0.9,
        "pause": chance.choice([0.0, 0.0, 0.0, 5.0, 50.0]),
        "stop_token_ids": STOP_TOKENS if chance.random() < 0.3 else frozenset(),
    }
    kind = chance.random()
    if kind < 0.2:
        request["n"] = chance.randint(2, 5)
    elif kind < 0.35:
        request["beam_width"] = chance.randint(2, 4)
        request["n"] = chance.randint(1, request["beam_width"])
    elif kind < 0.45:
        generated = chance.randint(1, 20)
        digest = digests(tokens)[-1]
        for _ in range(generated):
            tokens.append(token_after(digest, 0))
            digest = follow(digest, tokens[-1])
        request |= {"generated": generated, "stop_token_ids": frozenset()}
    elif kind < 0.5:
        request["prompt_logprobs"] = 0
    elif kind < 0.6:
        request |= {"embeds": True, "max_tokens": 0, "stop_token_ids": frozenset()}
    return request


def _submit(storm: Storm, chance: random.Random) -> None:
    if len(storm.scheduler.waiting) < 10:
        storm.submit(**random_request(chance))


def _plan(storm: Storm, chance: random.Random) -> None:
    storm.plan(frozenset({chance.randrange(6)}) if chance.random() < 0.01 else frozenset())


def _break(storm: Storm, chance: random.Random) -> None:
    if storm.scheduler.config.host_cache_blocks + storm.scheduler.config.swap_blocks:
        storm.break_next(chance.choice(["out", "in", "in", "copies", "after"]))


def _measure(storm: Storm, chance: random.Random) -> None:
    storm.measure(chance.choice([0.0, 50.0]), chance.choice([0.0, 1.0, 1000.0]), chance.choice([None, 16]))


ACTIONS: dict[Callable[[Storm, random.Random], None], float] = {
    _submit: 20.0,
    _plan: 28.5,
    lambda storm, chance: storm.commit(): 30.0,
    lambda storm, chance: storm.cancel_request(-chance.randint(1, 12)): 4.0,
    lambda storm, chance: storm.cancel_request(-chance.randint(1, 12), index=chance.randint(0, 2)): 3.0,
    lambda storm, chance: storm.fail(): 0.3,
    lambda storm, chance: storm.take_back(moved=chance.random() < 0.5): 0.2,
    _break: 1.0,
    lambda storm, chance: storm.corrupt(chance.randrange(1000)): 1.5,
    _measure: 1.5,
    lambda storm, chance: storm.offer_room(
        chance.choice([0, 15, 40, 40]), chance.choice([10.0, 1e4, 1e4])
    ): 1.5,
    lambda storm, chance: storm.receive(chance.randrange(100)): 3.0,
    lambda storm, chance: storm.end_pull(chance.randrange(100)): 2.0,
    lambda storm, chance: storm.late(): 0.2,
    lambda storm, chance: storm.lend(chance.randrange(1000)): 1.8,
    lambda storm, chance: storm.end_loan(chance.randrange(100)): 1.5,
}
"""Everything that may happen, and how often: parts of a hundred."""
_KINDS, _WEIGHTS = list(ACTIONS), list(ACTIONS.values())


def blow(storm: Storm, chance: random.Random, *, rare: float = 0.0) -> None:
    """Do one action. With a probability of `rare`, any is as likely as another."""
    weights = None if chance.random() < rare else _WEIGHTS
    chance.choices(_KINDS, weights)[0](storm, chance)


def weathered(weather: str, actions: int, *, trouble: float = 0.0) -> tuple[Storm, int]:
    """A storm that is over, and how many waited at most. `trouble`: how often host memory fails beside all else."""
    chance = random.Random(weather)
    storm = Storm(**({"max_num_seqs": 8, "max_model_len": 160} | WEATHERS[weather]))
    most_waiting = 0
    for _ in range(actions):
        if trouble and chance.random() < trouble:
            storm.break_next(chance.choice(["in", "after"]))
            storm.corrupt(chance.randrange(1000))
        blow(storm, chance)
        storm.check()
        most_waiting = max(most_waiting, len(storm.scheduler.waiting))
    storm.finish()
    return storm, most_waiting
