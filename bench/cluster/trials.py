"""Results of the benchmark: one trial for each seed, workload and system, and what each system takes while idle."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from blockyard.deploy.bench.summaries import Summary

from bench.cluster.systems import OURS
from bench.cluster.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of a workload on a system."""

    about: str
    seed: int
    summary: Summary
    usage: Usage

    @property
    def text(self) -> str:
        first = self.summary.latencies_ms["ttft"]
        return (
            f"{self.summary.output_tokens_per_second:.1f} tokens/s, first token p50 {first.p50 or 0:.0f} ms, hit rate "
            f"{self.summary.hit_rate or 0:.1%}, {self.usage.total_seconds:.1f} CPU s, failed {self.summary.failed}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """CPU time and memory of a system without requests."""

    usage: Usage
    memory_bytes: Mapping[str, int]

    @property
    def cores(self) -> float:
        return self.usage.total_seconds / self.usage.wall_seconds

    @property
    def text(self) -> str:
        return f"{self.cores:.1%} of a core, {sum(self.memory_bytes.values()) / 2**20:,.0f} MiB"


@dataclass(slots=True)
class Results:
    """Everything that a run measures."""

    trials: dict[str, dict[str, dict[str, list[Trial]]]] = field(default_factory=dict)
    """Trials by data type, workload and system."""
    idle: dict[str, dict[str, list[Idle]]] = field(default_factory=dict)
    """Measurements by data type and system."""
    absent: dict[str, str] = field(default_factory=dict)
    """Why systems did not start."""

    def add(self, dtype: str, workload: str, system: str, trial: Trial) -> None:
        self.trials.setdefault(dtype, {}).setdefault(workload, {}).setdefault(system, []).append(trial)

    @property
    def has_ours(self) -> bool:
        return any(OURS in systems for run in self.trials.values() for systems in run.values())
