"""`python -m bench.transfer.break_even MODEL FOLDER REPEATS RATE...`: from which length on a pull pays.

Prints JSON. For each rate of a link (links.py) the router's own view and price say from which length on a pulled prefix
comes earlier than a computed one. They know what the two workers report, and nothing else. Then prefixes of lengths
around that are computed and pulled in turns. The measured length is where the two times cross.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
from blockyard.proto.index.contract import WorkerId
from blockyard.router.cluster.depths import CachedDepth
from blockyard.router.cluster.view import ClusterView
from blockyard.router.placement.config import PlacementConfig
from blockyard.router.placement.scoring import pull_options

from bench.transfer.links import COME_UP, FAR, join, limit, run
from bench.transfer.rig import BLOCK_SIZE, Worker
from bench.transfer.speed import TAIL_TOKENS, block_bytes, options, prompt_of

MAX_TOKENS = 12_288
WARM_UP_TOKENS = 1_024
WARM_UP_PULLS = 12
"""Pulls after which a worker's averages are those of the new rate."""
FITTED_TOKENS = (64, 256, 1_024, 4_096, 8_192)
"""Prompts from whose steps the router fits the cost of computing."""
AROUND = (0.4, 0.6, 0.8, 1.0, 1.25, 1.6, 2.2)
"""Lengths to measure, as multiples of the estimated one."""
FEWEST_LENGTHS = 6
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

    def tokens(self) -> float:
        """Return the length from which on a pull comes earlier, infinite where none does up to MAX_TOKENS."""
        lengths = range(BLOCK_SIZE, MAX_TOKENS + 1, BLOCK_SIZE)
        return crossing(lengths, [self.saved_ms(length) for length in lengths])


def crossing(lengths: Sequence[float], saved: Sequence[float]) -> float:
    """Return the first length from which on something is saved, between two lengths by a straight line."""
    before, lost = 0.0, -1.0
    for length, gain in zip(lengths, saved, strict=True):
        if gain > 0:
            return before + (length - before) * (lost / (lost - gain) if before else 1.0)
        before, lost = length, gain
    return float("inf")


def fitted_crossing(lengths: Sequence[float], saved: Sequence[float]) -> float:
    """Return where the parabola through noisy savings begins to be positive. Infinite where that is not in range."""
    fine = np.linspace(min(lengths), max(lengths), 2000)
    return crossing(fine.tolist(), np.polyval(np.polyfit(lengths, saved, 2), fine).tolist())


async def measure(model: str, folder: Path, repeats: int, rates: list[int]) -> list[dict[str, Any]]:
    run("ip link set lo up")
    blocks = MAX_TOKENS // BLOCK_SIZE
    sizes = {"blocks": 3 * blocks, "block_bytes": block_bytes(model), "host_blocks": 2 * blocks}
    settings = options(model, folder, **sizes, max_model_len=MAX_TOKENS + 512)
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
            return [
                await _one_rate(
                    source, destination, estimate, chance, mbits, repeats, partial(limit, far_pid)
                )
                for mbits in rates
            ]
    finally:
        for worker in (source, destination):
            worker.end()


async def _one_rate(
    source: Worker,
    destination: Worker,
    estimate: Estimate,
    chance: random.Random,
    mbits: int,
    repeats: int,
    limited: Callable[[int], None],
) -> dict[str, Any]:
    limited(mbits)
    for _ in range(WARM_UP_PULLS):
        await _pulled_ms(source, destination, chance, WARM_UP_TOKENS)
    estimated = estimate.tokens()
    figures: dict[str, Any] = {"configured_mbits": mbits, "estimated_tokens": round(min(estimated, 1e9))}
    if estimated == float("inf"):
        return figures | {"measured_tokens": None, "off_by": None}
    wanted = set(range(1, FEWEST_LENGTHS + 1)) if estimated < FEWEST_LENGTHS * BLOCK_SIZE / 2 else set()
    wanted |= {max(1, round(factor * estimated / BLOCK_SIZE)) for factor in AROUND}
    lengths = sorted(BLOCK_SIZE * blocks for blocks in wanted if BLOCK_SIZE * blocks <= MAX_TOKENS)
    computed: dict[int, list[float]] = {length: [] for length in lengths}
    pulled: dict[int, list[float]] = {length: [] for length in lengths}
    for _ in range(repeats):
        for length in lengths:
            computed[length].append(await _computed_ms(destination, chance, length))
            pulled[length].append(await _pulled_ms(source, destination, chance, length))
    middle = [(statistics.median(computed[length]), statistics.median(pulled[length])) for length in lengths]
    measured = fitted_crossing(lengths, [one - other for one, other in middle])
    return figures | {
        "lengths": lengths,
        "computed_ms": [round(one, 2) for one, _ in middle],
        "pulled_ms": [round(other, 2) for _, other in middle],
        "measured_tokens": None if measured == float("inf") else round(measured),
        "off_by": None if measured == float("inf") else round(_off(estimated, measured), 3),
    }


def _off(estimated: float, measured: float) -> float:
    """Return the error of an estimate, beyond half a block: blocks are pulled whole."""
    return max(abs(estimated - measured) - BLOCK_SIZE / 2, 0.0) / measured


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
