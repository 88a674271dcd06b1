"""`python -m tests.nightly.faults.soak --minutes M --seed S [--report FILE]`: random faults under load.

After each fault the cluster has to become whole, and every stream's tokens and end are judged. At intervals the load
stops: then no block is used, the index equals the workers' truth, and samples are taken. Exits with 1 if anything did
not hold, and shows the seed and the faults so far. Row 50 of the fault matrix.

Owns the course of the run and the report. Does not own its parts (soak_*.py).
"""

import argparse
import asyncio
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .report import setting
from .soak_cluster import ROUTERS, WORKERS, SoakCluster, soak_cluster
from .soak_faults import FAULTS, WORKER_KILLED, Fault, commit, drawn
from .soak_load import SoakLoad, Struck, soak_load
from .soak_requests import kinds, references, warm_grammars
from .soak_samples import Samples, table

CALM_SECONDS = (0.3, 2.0)
QUIET_EVERY_SECONDS = 60.0
NUM_QUIETS = 5
"""In a run too short for one a minute."""
ABOUT = (
    "Random faults, one after another, hit four workers, two routers and a Redis under a steady load.",
    "`make soak REPORT=bench/reports/soak.md` writes this file.",
    "",
    "- After each fault the cluster must become whole again.",
    "- Every stream must end once, by its deadline, with the tokens of an undisturbed run as far as it came.",
    "- Every tenth answer must be JSON of its schema.",
    "- Once a minute the load pauses. Then no block may be used, the index must equal the workers' true caches,",
    "  and no log may hold a prompt. Samples are taken at these moments.",
    "- Workers `w0` to `w2` and router `r0` run from start to end, so that a slope can be seen.",
    "- *Lost with its router*: the client gets UNAVAILABLE, since only that router held the stream.",
)


@dataclass(slots=True, kw_only=True)
class Soak:
    """Results of a run, also of one that failed."""

    seed: int
    minutes: float
    began: float = field(default_factory=time.monotonic)
    faults: list[Fault] = field(default_factory=list)
    samples: Samples = field(default_factory=Samples)
    load: SoakLoad | None = None
    failure: str = ""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def say(self, text: str) -> None:
        print(f"{self.seconds:7.1f} s  {text}", flush=True)


async def run(soak: Soak, folder: Path) -> None:
    """Run the soak. Raises AssertionError, perhaps within a group, if something does not hold. SIGTERM ends what was
    started."""
    course = asyncio.current_task()
    assert course is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, course.cancel)
    async with soak_cluster(folder) as cluster:
        await cluster.until_whole()
        wanted = kinds()
        undisturbed = await references(cluster.clients[ROUTERS[0]], wanted)
        await warm_grammars(cluster.clients[ROUTERS[0]], WORKERS, wanted)
        async with soak_load(cluster.addresses, soak.seed, wanted, undisturbed) as load:
            soak.load, soak.began = load, time.monotonic()
            await _course(soak, cluster, load)
    if grown := soak.samples.growth():
        raise AssertionError("\n".join(grown))


async def _course(soak: Soak, cluster: SoakCluster, load: SoakLoad) -> None:
    calm, faults = random.Random(f"{soak.seed}/calm"), drawn(soak.seed)
    quiet_every = min(QUIET_EVERY_SECONDS, 60 * soak.minutes / NUM_QUIETS)
    await _quiet(soak, cluster, load)
    quiet_at = soak.seconds + quiet_every
    while soak.seconds < 60 * soak.minutes:
        await asyncio.sleep(calm.uniform(*CALM_SECONDS))
        await _strike(soak, cluster, load, next(faults))
        if soak.seconds >= quiet_at:
            await _quiet(soak, cluster, load)
            quiet_at = soak.seconds + quiet_every
    await _quiet(soak, cluster, load, is_last=True)


async def _strike(soak: Soak, cluster: SoakCluster, load: SoakLoad, fault: Fault) -> None:
    soak.faults.append(fault)
    struck = Struck(kind=fault.kind, target=fault.target, at=time.monotonic())
    load.struck.append(struck)
    await commit(cluster, load, fault)
    healed_at = time.monotonic()
    await cluster.until_whole()
    struck.until = time.monotonic()
    struck.whole_seconds = struck.until - healed_at
    if fault.kind == WORKER_KILLED:
        await warm_grammars(cluster.clients[ROUTERS[0]], {fault.target}, load.kinds)
    soak.say(f"{fault}: whole {struck.whole_seconds:.1f} s after it")
    load.check()


async def _quiet(soak: Soak, cluster: SoakCluster, load: SoakLoad, *, is_last: bool = False) -> None:
    """The first one only takes the samples that others are compared to."""
    await load.pause()
    load.check()
    await cluster.until_quiet(is_last=is_last)
    cluster.take(soak.samples, soak.seconds)
    soak.say(f"quiet: {dict(load.outcomes)}; MiB: {soak.samples.latest()}")
    if not is_last:
        load.resume()


def told(soak: Soak, command: Sequence[str]) -> list[str]:
    """Return the report as Markdown."""
    outcomes = {} if soak.load is None else soak.load.outcomes
    verdict = f"**Does not hold**: {soak.failure}" if soak.failure else "Every invariant held."
    return [
        "# Soak",
        "",
        *ABOUT,
        "",
        f"{setting()} `{shlex.join(command)}`, {soak.seconds:.0f} s with {len(soak.faults)} faults. {verdict}",
        "",
        "| requests | count |",
        "|---|---|",
        *(f"| {outcome} | {count} |" for outcome, count in sorted(outcomes.items())),
        "",
        "| fault | times | requests failed | requests migrated | longest pause of a stream | whole again after |",
        "|---|---|---|---|---|---|",
        *(_fault_row(kind, [] if soak.load is None else soak.load.struck) for kind in FAULTS),
        "",
        *table(soak.samples),
    ]


def _fault_row(kind: str, struck: Sequence[Struck]) -> str:
    found = [each for each in struck if each.kind == kind]
    pause = max((each.longest_pause for each in found), default=0.0)
    whole = max((each.whole_seconds for each in found), default=0.0)
    failed, migrated = sum(each.failed for each in found), sum(each.migrated for each in found)
    return f"| {kind} | {len(found)} | {failed} | {migrated} | {pause:.2f} s | {whole:.2f} s |"


def soaked(soak: Soak, folder: Path) -> None:
    """Run the soak to its end. A failure goes into `failure` and is shown."""
    print(f"seed {soak.seed}", flush=True)
    try:
        asyncio.run(run(soak, folder))
    except Exception as error:
        traceback.print_exception(error)
        soak.failure = _first_cause(error)
        print(f"seed {soak.seed}, after:", *soak.faults, sep="\n  ", flush=True)


def _first_cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {'; '.join(str(error).splitlines())}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nightly.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, help="of faults and requests; by default another each time")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the tables there")
    arguments = parser.parse_args()
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    soak = Soak(seed=seed, minutes=arguments.minutes)
    folder = Path(tempfile.mkdtemp(prefix="blockyard-soak-"))
    soaked(soak, folder)
    command = [
        "python",
        "-m",
        "tests.nightly.faults.soak",
        "--minutes",
        f"{soak.minutes:g}",
        "--seed",
        str(seed),
    ]
    report = told(soak, command)
    print("", *report, sep="\n")
    if arguments.report is not None:
        arguments.report.write_text("\n".join([*report, ""]))
    if soak.failure:
        print(f"the logs are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
