"""Resource samples of processes and Redis in a long run, and whether they grow. Pure.

Owns samples, slopes and limits. Does not own when or how a sample is taken (soak_cluster.py).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from .invariants import MAX_MORE_DESCRIPTORS, MAX_MORE_KEYS, MAX_MORE_THREADS, Usage

MIB = 2**20
WARM_UP_SHARE = 0.2
"""Share of an incarnation that is warm-up: allocators, caches and connection pools fill."""
STEADY_SECONDS = 300.0
"""Shortest incarnation for which a slope is meaningful. For shorter ones the total growth is checked."""
MAX_BYTES_PER_MINUTE = 1 * MIB
MAX_MORE_BYTES = 3 * MIB
"""Maximum growth of a shorter incarnation after its warm-up."""
MAX_MORE_REDIS_BYTES = 4 * MIB
MAX_MORE_TASKS = 25
"""Tolerance in tasks. A connection through a proxy is five tasks, and some may just be ending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample of a process, while the cluster is idle."""

    at_seconds: float
    usage: Usage
    tasks: int | None = None
    """Number of asyncio tasks, where it can be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One incarnation of a process, from its start to its end."""

    name: str
    pid: int
    samples: list[Sample] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.samples[-1].at_seconds - self.samples[0].at_seconds

    @property
    def settled(self) -> list[Sample]:
        """Samples after the warm-up."""
        begin = self.samples[0].at_seconds + WARM_UP_SHARE * self.seconds
        return [sample for sample in self.samples if sample.at_seconds >= begin]

    @property
    def bytes_per_minute(self) -> float:
        return slope_per_minute([(sample.at_seconds, sample.usage.resident_bytes) for sample in self.settled])


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSample:
    """One sample of Redis, across all its incarnations: workers republish what it held."""

    at_seconds: float
    keys: int
    used_bytes: int


@dataclass(slots=True, kw_only=True)
class Samples:
    """All samples of a run."""

    lives: dict[int, Life] = field(default_factory=dict)
    """Incarnations by pid."""
    redis: list[RedisSample] = field(default_factory=list)

    def add(self, name: str, pid: int, sample: Sample) -> None:
        self.lives.setdefault(pid, Life(name=name, pid=pid)).samples.append(sample)

    def latest(self) -> dict[str, int]:
        """Return the memory in MiB by name, of the last incarnation of each name."""
        return {life.name: life.samples[-1].usage.resident_bytes // MIB for life in self.lives.values()}

    def growth(self) -> list[str]:
        """Return what grew more than it may."""
        found = [line for life in self.lives.values() for line in life_growth(life)]
        return found + redis_growth(self.redis)


def slope_per_minute(points: Sequence[tuple[float, float]]) -> float:
    """Return the least-squares slope of (seconds, value) per minute, or 0 for fewer than two points."""
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return 60 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def life_growth(life: Life) -> list[str]:
    """Return one sentence for each resource that grew."""
    found = []
    first, last, settled = life.samples[0], life.samples[-1], life.settled
    more_bytes = last.usage.resident_bytes - settled[0].usage.resident_bytes
    if life.seconds >= STEADY_SECONDS:
        if life.bytes_per_minute >= MAX_BYTES_PER_MINUTE:
            found.append(f"memory grows by {life.bytes_per_minute / MIB:.2f} MiB/min")
    elif more_bytes > MAX_MORE_BYTES:
        found.append(f"memory grew by {more_bytes / MIB:.1f} MiB in {life.seconds:.0f} s")
    for what, before, now, most in (
        ("descriptors", first.usage.descriptors, last.usage.descriptors, MAX_MORE_DESCRIPTORS),
        ("threads", first.usage.threads, last.usage.threads, MAX_MORE_THREADS),
        ("tasks", first.tasks or 0, last.tasks or 0, MAX_MORE_TASKS),
    ):
        if now > before + most:
            found.append(f"{what}: {before} -> {now}")
    return [f"{life.name} (pid {life.pid}): {line}" for line in found]


def redis_growth(samples: Sequence[RedisSample]) -> list[str]:
    """Compare with the first sample after the warm-up: before it, the caches are not full."""
    if not samples:
        return []
    begin = samples[0].at_seconds + WARM_UP_SHARE * (samples[-1].at_seconds - samples[0].at_seconds)
    first, last = next(sample for sample in samples if sample.at_seconds >= begin), samples[-1]
    found = []
    if last.keys > first.keys + MAX_MORE_KEYS:
        found.append(f"Redis: keys: {first.keys} -> {last.keys}")
    if last.used_bytes > first.used_bytes + MAX_MORE_REDIS_BYTES:
        found.append(f"Redis: memory: {first.used_bytes / MIB:.1f} -> {last.used_bytes / MIB:.1f} MiB")
    return found


def table(samples: Samples) -> list[str]:
    """Return the table: the longest incarnation of each name, and all incarnations of Redis as one."""
    lines = [
        "| process | incarnations | seconds | memory, MiB | MiB/min after the warm-up "
        "| descriptors | threads | tasks |",
        "|---|---|---|---|---|---|---|---|",
    ]
    by_name = attrgetter("name")
    for name, found in groupby(sorted(samples.lives.values(), key=by_name), key=by_name):
        lives = list(found)
        lines.append(_row(name, len(lives), max(lives, key=attrgetter("seconds"))))
    if samples.redis:
        first, last = samples.redis[0], samples.redis[-1]
        used = _change([sample.used_bytes / MIB for sample in (first, last)], ".1f")
        keys = _change([first.keys, last.keys])
        lines += ["", f"Redis: keys but the index's buckets {keys}, memory {used} MiB."]
    return lines


def _row(name: str, num_lives: int, life: Life) -> str:
    ends = (life.samples[0], life.samples[-1])
    usages = [sample.usage for sample in ends]
    cells = (
        name,
        str(num_lives),
        f"{life.seconds:.0f}",
        _change([usage.resident_bytes / MIB for usage in usages], ".1f"),
        f"{life.bytes_per_minute / MIB:+.2f}",
        _change([usage.descriptors for usage in usages]),
        _change([usage.threads for usage in usages]),
        "-" if ends[0].tasks is None else _change([sample.tasks or 0 for sample in ends]),
    )
    return f"| {' | '.join(cells)} |"


def _change(values: Iterable[float], form: str = "") -> str:
    return " → ".join(format(value, form) for value in values)
