"""`python -m bench.transfer.break_even MODEL FOLDER REPEATS RATE...`: from which rate of a link on a pull pays.

Prints JSON. At each rate (links.py) the router's own view and price say how much earlier a pulled prefix comes than a
computed one. They know what the two workers report, and nothing else. Then such prefixes are computed and pulled in
turns. The rate from which on a pull pays is where either saving, as a function of the rate, crosses zero.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from secrets import token_hex
from typing import Any

from blockyard.proto.index.contract import WorkerId
from blockyard.router.cluster.depths import CachedDepth
from blockyard.router.cluster.view import ClusterView
from blockyard.router.placement.config import PlacementConfig
from blockyard.router.placement.scoring import pull_options

from bench.transfer.links import COME_UP, FAR, join, limit, run
from bench.transfer.rig import BLOCK_SIZE, Worker
from bench.transfer.speed import TAIL_TOKENS, block_bytes, options, prompt_of

PREFIXES = (512, 1_024, 2_048)
"""Lengths of the prefixes in tokens."""
MAX_TOKENS = 8_704
WARM_UP_PULLS = 4
"""Pulls of each length after which a worker's averages are those of the new rate."""
FITTED_TOKENS = (64, 256, 1_024, 4_096, 8_192)
"""Prompts from whose steps the router fits the cost of computing."""
MAX_SECONDS = 60.0


class Estimate:
    """A router's view of the two workers."""

    def __init__(self, source: Worker, destination: Worker) -> None:
        self._config = PlacementConfig()
        self._view = ClusterView(
            suspect_seconds=1e6, lost_seconds=2e6, clock=time.monotonic, config=self._config
        )
        self._source, self._destination = source, destination
        for worker in (source, destination):
            self._view.accepted(worker.address, worker.hello)
            worker.on_load = partial(self._view.heard, worker.address)

    def saved_ms(self, tokens: int) -> float:
        """Return how much earlier a prefix of so many tokens comes by a pull than by computing. Raises RuntimeError
        while a worker has not measured what that takes."""
        prompt_tokens = tokens + TAIL_TOKENS
        depths = {WorkerId(self._source.name): CachedDepth(blocks=tokens // BLOCK_SIZE)}
        sources = self._view.pull_sources(depths, prompt_tokens, salt=0)
        for candidate in self._view.candidates([], prompt_tokens, depths):
            if candidate.address == self._destination.address:
                for option in pull_options(prompt_tokens, candidate, self._config, sources):
                    if option.pulled_tokens:
                        return option.saved_ms
        raise RuntimeError(f"the router knows no price of a pull of {tokens} tokens")


def crossing(rates: Sequence[float], saved: Sequence[float]) -> float | None:
    """Return the rate from which on something is saved. None where that is none of these rates, or all of them.

    The time of a transfer is inverse to the rate. So between two rates the saving is linear in the inverse.
    """
    for (low, lost), (high, gain) in pairwise(zip(rates, saved, strict=True)):
        if lost <= 0 < gain:
            return 1 / (1 / low + (1 / high - 1 / low) * lost / (lost - gain))
    return None


async def measure(model: str, folder: Path, repeats: int, rates: list[int]) -> list[dict[str, Any]]:
    run("ip link set lo up")
    blocks = MAX_TOKENS // BLOCK_SIZE
    sizes = {"blocks": 3 * blocks, "block_bytes": block_bytes(model), "host_blocks": 2 * blocks}
    settings = options(model, folder, **sizes, max_model_len=MAX_TOKENS)
    secret, chance = token_hex(32), random.Random(4)
    source = Worker("source", settings, secret=secret, folder=folder, host=FAR)
    destination = Worker("dest", settings, secret=secret, folder=folder, host="127.0.0.1")
    try:
        far_pid = source.spawn(("unshare", "--net", "sh", "-c", COME_UP, "sh"))
        join(far_pid)
        destination.spawn()
        async with source.session(), destination.session():
            estimate = Estimate(source, destination)
            for length in FITTED_TOKENS * 3:
                await destination.ask(prompt_of(chance, length), 4)
            found: dict[int, list[tuple[float, float]]] = {length: [] for length in PREFIXES}
            for mbits in rates:
                limit(far_pid, mbits)
                for length in PREFIXES * WARM_UP_PULLS:
                    await _pulled_ms(source, destination, chance, length)
                for length in PREFIXES:
                    pairs = [
                        (
                            await _computed_ms(destination, chance, length),
                            await _pulled_ms(source, destination, chance, length),
                        )
                        for _ in range(repeats)
                    ]
                    saved = statistics.median(computed - pulled for computed, pulled in pairs)
                    found[length].append((estimate.saved_ms(length), saved))
            return [_figures(length, rates, found[length]) for length in PREFIXES]
    finally:
        for worker in (source, destination):
            worker.end()


def _figures(length: int, rates: list[int], savings: list[tuple[float, float]]) -> dict[str, Any]:
    estimated, measured = (crossing(rates, saved) for saved in zip(*savings, strict=True))
    off_by = None if estimated is None or measured is None else round(abs(estimated / measured - 1), 3)
    return {
        "prefix_tokens": length,
        "mbits": rates,
        "estimated_saved_ms": [round(saved, 1) for saved, _ in savings],
        "measured_saved_ms": [round(saved, 1) for _, saved in savings],
        "estimated_mbits": None if estimated is None else round(estimated, 1),
        "measured_mbits": None if measured is None else round(measured, 1),
        "off_by": off_by,
    }


async def _computed_ms(destination: Worker, chance: random.Random, length: int) -> float:
    answer = await destination.ask(prompt_of(chance, length + TAIL_TOKENS), 1)
    assert answer.cached_tokens == 0
    return 1000 * answer.first_seconds


async def _pulled_ms(source: Worker, destination: Worker, chance: random.Random, length: int) -> float:
    prompt = prompt_of(chance, length + TAIL_TOKENS)
    await source.ask(prompt, 1)
    answer = await destination.ask(prompt, 1, pull=source.order(length // BLOCK_SIZE, MAX_SECONDS))
    assert answer.cached_tokens == length, answer.report
    return 1000 * answer.first_seconds


if __name__ == "__main__":
    MODEL, FOLDER, REPEATS, *RATES = sys.argv[1:]
    print(json.dumps(asyncio.run(measure(MODEL, Path(FOLDER), int(REPEATS), list(map(int, RATES))))))
