"""Benchmark of the prefix index in a real Redis, beside llm-d's schema: memory, look-ups, writes, purge, rebuild.

    python -m bench.index            # about four minutes, writes bench/reports/<today>-index.{md,json,png}
    python -m bench.index --quick    # a smoke test: prints the report, keeps nothing

Starts a private redis-server, and drives RedisPrefixIndex through its public API with redis-py. The peer (llmd.py)
uses the same client and the same names, in turns.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import redis
from blockyard.deploy.machine.redis_server import start_private_redis
from blockyard.proto.index.redis import connect
from redis.asyncio import Redis

from bench.index.load import warm_up
from bench.index.rebuild import RebuildScale, measure_rebuild
from bench.index.server import MachineClock
from bench.index.sharing import SharingScale, measure_sharing, measure_variations
from bench.index.text import floors, report_text
from bench.index.writes import WriteScale, measure_effect_on_others, measure_writes
from bench.plots import draw
from bench.reporting import REPORTS, write_report

TIMEOUT_SECONDS = 60.0
"""Time limit of one call. FLUSHALL of a million entries takes a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    sharing: SharingScale = field(default_factory=SharingScale)
    writes: WriteScale = field(default_factory=WriteScale)
    rebuild: RebuildScale = field(default_factory=RebuildScale)

    def repeated(self, repeats: int) -> "Scale":
        return replace(
            self,
            sharing=replace(self.sharing, repeats=repeats),
            writes=replace(self.writes, repeats=repeats),
        )


QUICK = Scale(
    sharing=SharingScale(sharers=(1, 4), chains=8, peer_chains=2, lookups=20, repeats=2),
    writes=WriteScale(workers=4, names_a_worker=2000, peer_names_a_worker=500, lookups=20, repeats=1),
    rebuild=RebuildScale(workers=4, names_a_worker=1000, repeats=1),
)


async def measure(url: str, scale: Scale) -> dict[str, Any]:
    """Measure all figures of the report."""
    async with connect(url, timeout_seconds=TIMEOUT_SECONDS) as client:
        clock = await MachineClock.start(client)
        await warm_up(client)
        sharing = {
            str(sharers): await _step(f"{sharers} sharers", measure_sharing, client, sharers, scale.sharing)
            for sharers in scale.sharing.sharers
        }
        most = scale.sharing.sharers[-1]
        figures = {
            "redis": str((await client.info("server"))["redis_version"]),
            "repeats": scale.sharing.repeats,
            "sharing": sharing,
            "variations": await _step("variations", measure_variations, client, most, scale.sharing),
            "writes": await _step("writes", measure_writes, client, scale.writes),
            "effect_on_others": await _step("others", measure_effect_on_others, client, url, scale.writes),
            "rebuild": await _step("rebuild", measure_rebuild, client, scale.rebuild),
        }
        return figures | {"machine_load": await clock.stop(client)}


async def _step(
    label: str, work: Callable[..., Awaitable[dict[str, Any]]], client: Redis, *arguments: object
) -> dict[str, Any]:
    print(f"{label} ...", file=sys.stderr, flush=True)
    return await work(client, *arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, for a smoke test; keeps no report")
    parser.add_argument("--repeats", type=int, help="turns of each measurement (default: 5)")
    arguments = parser.parse_args()
    if arguments.repeats is not None and arguments.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {arguments.repeats}")
    scale = QUICK if arguments.quick else Scale()
    if arguments.repeats is not None:
        scale = scale.repeated(arguments.repeats)
    with tempfile.TemporaryDirectory() as folder:
        process = start_private_redis(Path(folder) / "redis")
        try:
            figures = asyncio.run(measure(process.url, scale))
        finally:
            process.stop()
        reports = Path(folder) if arguments.quick else REPORTS
        print(keep(figures, reports).read_text(encoding="utf-8"))


def keep(figures: dict[str, Any], folder: Path) -> Path:
    """Write the report and its plot. Return the path of the Markdown."""
    path = write_report(
        "index",
        title="The prefix index beside llm-d's schema",
        text=report_text(figures, picture=f"{date.today().isoformat()}-index.png"),
        figures=figures,
        floors=floors(figures),
        versions={"redis": figures["redis"], "redis-py": redis.__version__},
        folder=folder,
    )
    draw(path)
    return path


if __name__ == "__main__":
    main()
