"""First tokens of a prefix that is pulled, computed or cached in host memory, and decodes beside saturating pulls."""

import asyncio
import random
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.engine.shapes import SHAPES
from bench.reporting import percentile
from bench.transfer.rig import BLOCK_SIZE, Worker, options_of, two_workers

PREFIX_TOKENS = 4096
TAIL_TOKENS = 8
BLOCKS = PREFIX_TOKENS // BLOCK_SIZE
POOL_BLOCKS = BLOCKS + 40
"""Little more than one prefix, so that each one evicts the one before to host memory."""
HOST_BLOCKS = 4 * BLOCKS
DECODES = 4
DECODE_SECONDS = 8.0
OUTPUT_TOKENS = 4


def block_bytes(model: str, dtype: str = "float32") -> int:
    shape = SHAPES[model]
    value_bytes = 4 if dtype == "float32" else 2
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * BLOCK_SIZE * value_bytes


def options(model: str, folder: Path, *, dtype: str = "float32", **more: Any) -> list[str]:
    sizes = {"blocks": POOL_BLOCKS, "block_bytes": block_bytes(model, dtype), "host_blocks": HOST_BLOCKS}
    settings = {"load_format": "random", "dtype": dtype, "max_model_len": PREFIX_TOKENS + 512}
    return options_of(folder, **(sizes | settings | more))


def prompt_of(chance: random.Random, length: int = PREFIX_TOKENS + TAIL_TOKENS) -> list[int]:
    return [chance.randrange(3, 30_000) for _ in range(length)]


async def first_tokens(
    model: str, folder: Path, *, secret: str, repeats: int, dtype: str, device: str
) -> dict[str, Any]:
    """Measure each way in turns. Return the times in seconds, and how often the tokens differed."""
    settings = options(model, folder, dtype=dtype, device=device)
    times: dict[str, list[float]] = {
        "recomputed": [],
        "pulled": [],
        "host hit": [],
        "transfer": [],
        "set-up": [],
    }
    chance, differing = random.Random(1), 0
    async with two_workers(folder, settings, secret=secret) as (source, destination):
        earlier = None
        for repeat in range(repeats + 1):
            prompt = prompt_of(chance)
            computed = await source.ask(prompt, OUTPUT_TOKENS)
            pulled = await destination.ask(prompt, OUTPUT_TOKENS, pull=source.order(BLOCKS, 60.0))
            assert computed.cached_tokens == 0
            assert pulled.cached_tokens == PREFIX_TOKENS, pulled.report
            differing += pulled.tokens != computed.tokens
            if repeat:  # The first repeat warms up.
                assert earlier is not None
                hit = await destination.ask(earlier[0], OUTPUT_TOKENS)
                assert hit.cached_tokens == PREFIX_TOKENS
                differing += hit.tokens != earlier[1]
                assert pulled.report is not None
                times["recomputed"].append(computed.first_seconds)
                times["pulled"].append(pulled.first_seconds)
                times["host hit"].append(hit.first_seconds)
                times["transfer"].append(pulled.report.transfer_seconds)
                times["set-up"].append(pulled.report.setup_seconds)
            earlier = prompt, computed.tokens
    return {
        "seconds": {name: round(statistics.median(found), 4) for name, found in times.items()},
        "all_seconds": {name: [round(value, 4) for value in found] for name, found in times.items()},
        "megabytes": BLOCKS * block_bytes(model, dtype) / 1e6,
        "other_tokens": differing,
        "pulled_to_recomputed": ratio(times["pulled"], times["recomputed"]),
        "pulled_to_host_hit": ratio(times["pulled"], times["host hit"]),
    }


def ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the median ratio of pairs."""
    return round(statistics.median(one / other for one, other in zip(values, others, strict=True)), 4)


async def beside_decodes(
    model: str, folder: Path, *, secret: str, repeats: int, dtype: str, device: str
) -> dict[str, Any]:
    """Measure gaps between tokens at both ends, in turns without and with pulls one after the other."""
    gaps: dict[str, dict[str, list[float]]] = {
        name: {"without": [], "with": []} for name in ("source", "destination")
    }
    pulls = 0
    chance = random.Random(2)
    roomy = {"blocks": POOL_BLOCKS + 150, "mixed_step_seconds": 0.05}
    settings = options(model, folder, dtype=dtype, device=device, **roomy)
    async with two_workers(folder, settings, secret=secret) as (source, destination):
        prompt = prompt_of(chance)
        await source.ask(prompt, 1)
        for turn in range(2 * repeats):
            kind = ("without", "with")[turn % 2]
            handles = [
                (name, worker, await worker.submit(prompt_of(chance, 64), 400))
                for name, worker in (("source", source), ("destination", destination))
                for _ in range(DECODES)
            ]
            await asyncio.sleep(2)
            begun = asyncio.get_running_loop().time()
            if kind == "without":
                await asyncio.sleep(DECODE_SECONDS)
            else:
                while asyncio.get_running_loop().time() < begun + DECODE_SECONDS:
                    answer = await destination.ask(prompt, 1, pull=source.order(BLOCKS, 60.0))
                    assert answer.report is not None
                    assert answer.report.num_blocks == BLOCKS, answer.report
                    pulls += 1
                    await destination.flush()
            for name, worker, handle in handles:
                gaps[name][kind] += _gaps(worker, handle, 2.0)
            await source.cancel_all()
            await destination.cancel_all()
            await asyncio.sleep(0.5)
    figures: dict[str, Any] = {"pulls": pulls, "decodes": DECODES}
    for name, kinds in gaps.items():
        figures[name] = {
            kind: {"p50_ms": _ms(found, 0.5), "p99_ms": _ms(found, 0.99), "gaps": len(found)}
            for kind, found in kinds.items()
        }
        figures[name]["p99_ratio"] = round(
            percentile(kinds["with"], 0.99) / percentile(kinds["without"], 0.99), 3
        )
        figures[name]["p50_ratio"] = round(
            percentile(kinds["with"], 0.5) / percentile(kinds["without"], 0.5), 3
        )
    return figures


def _gaps(worker: Worker, handle: int, after_seconds: float) -> list[float]:
    arrivals = [arrival for arrival in worker.arrivals_of(handle) if arrival >= after_seconds]
    return [later - earlier for earlier, later in pairwise(arrivals)]


def _ms(values: Sequence[float], share: float) -> float:
    return round(1000 * percentile(values, share), 2)
