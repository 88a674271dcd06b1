"""Figures and floors of the benchmark of the whole path. Pure."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bench.cluster.systems import OURS
from bench.cluster.trials import Idle, Results, Trial
from bench.reporting import Floor

Figures = dict[str, Any]
MIN_SEEDS = 3
MIN_THROUGHPUT, MAX_FIRST_TOKEN, MAX_CPU_SECONDS, MAX_IDLE_CORES = 1.2, 0.8, 0.85, 0.03
"""Goals of the first three are ratios to the best peer."""


def figures_of(results: Results) -> Figures:
    return {
        "whole_path": {
            dtype: {workload: _workload(systems) for workload, systems in run.items()}
            for dtype, run in results.trials.items()
        },
        "idle": {
            dtype: {system: _idle(rows) for system, rows in run.items()}
            for dtype, run in results.idle.items()
        },
        "absent": results.absent,
    }


def floors_of(figures: Figures) -> list[Floor]:
    """Return the floors of what was measured. A quick run has no floor."""
    floors = []
    for dtype, run in figures["whole_path"].items():
        for name, workload in run.items():
            if (ratios := workload["ratios"]) and workload["seeds"] >= MIN_SEEDS:
                where = f"{name}, {dtype}"
                floors += _ratio_floors(where, ratios, is_at_rate=name == "one-a-second")
    for dtype, systems in figures["idle"].items():
        if OURS in systems and systems[OURS]["repeats"] >= MIN_SEEDS:
            cores = systems[OURS]["cores"]
            floors.append(
                Floor(name=f"idle cores, {dtype}", value=cores, floor=MAX_IDLE_CORES, better="lower")
            )
    return floors


def _ratio_floors(where: str, ratios: Mapping[str, float], *, is_at_rate: bool) -> list[Floor]:
    throughput = [
        Floor(
            name=f"tokens/s over the best peer's, {where}",
            value=ratios["output_tokens_per_second"],
            floor=MIN_THROUGHPUT,
            better="higher",
        )
    ]
    return [
        # At a fixed rate of arrivals all systems give the same throughput.
        *([] if is_at_rate else throughput),
        Floor(
            name=f"first token p50 over the best peer's, {where}",
            value=ratios["first_token_p50_ms"],
            floor=MAX_FIRST_TOKEN,
            better="lower",
        ),
        Floor(
            name=f"hit rate less the best peer's, {where}",
            value=ratios["hit_rate"],
            floor=0.0,
            better="higher",
        ),
        Floor(
            name=f"CPU seconds over the best peer's, {where}",
            value=ratios["cpu_seconds"],
            floor=MAX_CPU_SECONDS,
            better="lower",
        ),
    ]


def _workload(systems: Mapping[str, Sequence[Trial]]) -> Figures:
    rows = {name: [_trial(trial) for trial in trials] for name, trials in systems.items()}
    return {
        "about": next(iter(systems.values()))[0].about,
        "prompt_tokens": max(row["prompt_tokens"] for trials in rows.values() for row in trials),
        "output_tokens": max(row["output_tokens"] for trials in rows.values() for row in trials),
        "seeds": min(map(len, rows.values())),
        "systems": {name: {"median": _medians(trials), "trials": trials} for name, trials in rows.items()},
        "ratios": _ratios(rows),
    }


def _trial(trial: Trial) -> Figures:
    found = trial.summary
    first, between = found.latencies_ms["ttft"], found.latencies_ms["itl"]
    return {
        "seed": trial.seed,
        "output_tokens_per_second": round(found.output_tokens_per_second, 2),
        "first_token_p50_ms": _rounded(first.p50),
        "first_token_p99_ms": _rounded(first.p99),
        "between_tokens_p50_ms": _rounded(between.p50),
        "between_tokens_p99_ms": _rounded(between.p99),
        "hit_rate": round(found.hit_rate or 0.0, 4),
        "failed": sum(found.failed.values()),
        "output_tokens": found.output_tokens,
        "prompt_tokens": found.prompt_tokens,
        "cpu_seconds": round(trial.usage.total_seconds, 2),
        "cpu_seconds_by_role": {role: round(used, 2) for role, used in trial.usage.cpu_seconds.items()},
        "foreign_cores": round(trial.usage.foreign_cores, 3),
    }


def _rounded(milliseconds: float | None) -> float:
    return round(milliseconds or 0.0, 1)


def _medians(trials: Sequence[Figures]) -> Figures:
    """Return the median over the seeds of each number and of each role's CPU seconds."""
    roles = {role for trial in trials for role in trial["cpu_seconds_by_role"]}
    numbers = {
        name: median(trial[name] for trial in trials)
        for name, value in trials[0].items()
        if isinstance(value, int | float) and name != "seed"
    }
    by_role = {
        role: round(median(trial["cpu_seconds_by_role"].get(role, 0.0) for trial in trials), 2)
        for role in sorted(roles)
    }
    return {**numbers, "cpu_seconds_by_role": by_role}


def _ratios(rows: Mapping[str, Sequence[Figures]]) -> Figures:
    """Compare ours with the peer that is best in each figure, seed by seed. Return the medians, or nothing."""
    peers = [trials for name, trials in rows.items() if name != OURS]
    if OURS not in rows or not peers:
        return {}
    pairs = list(zip(rows[OURS], *peers, strict=False))
    return {
        "output_tokens_per_second": _median_ratio(pairs, "output_tokens_per_second", max),
        "first_token_p50_ms": _median_ratio(pairs, "first_token_p50_ms", min),
        "cpu_seconds": _median_ratio(pairs, "cpu_seconds", min),
        "hit_rate": median(
            ours["hit_rate"] - max(peer["hit_rate"] for peer in others) for ours, *others in pairs
        ),
    }


def _median_ratio(pairs: Sequence[tuple[Figures, ...]], name: str, best: Any) -> float:
    ratios = [ours[name] / (best(peer[name] for peer in peers) or 1.0) for ours, *peers in pairs]
    return round(median(ratios), 3)


def _idle(rows: Sequence[Idle]) -> Figures:
    roles = sorted({role for row in rows for role in row.usage.cpu_seconds})
    return {
        "repeats": len(rows),
        "cores": round(median(row.cores for row in rows), 4),
        "cores_by_role": {
            role: round(
                median(row.usage.cpu_seconds.get(role, 0.0) / row.usage.wall_seconds for row in rows), 4
            )
            for role in roles
        },
        "memory_mib": round(median(sum(row.memory_bytes.values()) for row in rows) / 2**20),
        "memory_mib_by_role": {
            role: round(median(row.memory_bytes.get(role, 0) for row in rows) / 2**20) for role in roles
        },
    }
