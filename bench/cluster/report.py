"""Report of the benchmark of the whole path: its text, and writing it. figures.py computes the figures."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from bench.cluster.figures import MIN_SEEDS, Figures, figures_of, floors_of
from bench.cluster.systems import NUM_WORKERS
from bench.cluster.trials import Results
from bench.cluster.workloads import TOKENS_A_WORD
from bench.reporting import write_report

TITLE = "The whole path, beside vLLM behind sglang-router"
INTRODUCTION = f"""\
Each system has {NUM_WORKERS} workers of one core each, unless an `--up-option` of the command says otherwise. All
have the same checkpoint and the same HTTP client, which streams `/v1/completions`. Prompts are words, of about
{TOKENS_A_WORD} tokens each. Only one system runs at a time, and they take turns, seed by seed. Each gets other words
of the same number. `First` is the time to the first token, `between` the time between two messages with tokens. CPU
seconds are those of all processes of the system, without the client. Numbers are medians over the seeds. A ratio
compares ours with the peer that is best in this figure, in the same seed. `Foreign cores` were used by other programs
or virtual machines."""


def text_of(figures: Figures, model: str) -> str:
    parts = [INTRODUCTION, f"Model {model}."]
    parts += [f"Not measured: {name} ({reason})." for name, reason in figures["absent"].items()]
    for dtype, run in figures["whole_path"].items():
        parts += [_workload(f"{name}, {dtype}", workload) for name, workload in run.items()]
    parts += [_idle(f"Idle, {dtype}", systems) for dtype, systems in figures["idle"].items()]
    return "\n\n".join(parts)


def _workload(title: str, workload: Figures) -> str:
    head = (
        "| system | tokens/s | first ms p50 / p99 | between ms p50 / p99 | hit rate | CPU s | by process | failed "
        "| foreign cores |\n|---|---|---|---|---|---|---|---|---|"
    )
    rows = [_row(name, system["median"]) for name, system in workload["systems"].items()]
    few = f" **Fewer than {MIN_SEEDS} seeds: too few for a claim.**" if workload["seeds"] < MIN_SEEDS else ""
    tokens = f"{workload['prompt_tokens']:,} tokens in, {workload['output_tokens']:,} out"
    about = f"In words: {workload['about']}. {tokens}; {workload['seeds']} seeds.{few}"
    return "\n".join([f"## {title}", "", about, "", head, *rows, *_ratios(workload["ratios"])])


def _row(name: str, row: Figures) -> str:
    cells = [
        name,
        f"{row['output_tokens_per_second']:,.1f}",
        f"{row['first_token_p50_ms']:,.0f} / {row['first_token_p99_ms']:,.0f}",
        f"{row['between_tokens_p50_ms']:,.0f} / {row['between_tokens_p99_ms']:,.0f}",
        f"{row['hit_rate']:.1%}",
        f"{row['cpu_seconds']:.1f}",
        ", ".join(f"{role} {seconds:.2f}" for role, seconds in row["cpu_seconds_by_role"].items()),
        f"{row['failed']:.0f}",
        f"{row['foreign_cores']:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _ratios(ratios: Mapping[str, float]) -> list[str]:
    if not ratios:
        return []
    return [
        "",
        f"Ours to the best peer: tokens/s {ratios['output_tokens_per_second']:.2f}, first token p50 "
        f"{ratios['first_token_p50_ms']:.2f}, CPU seconds {ratios['cpu_seconds']:.2f}, hit rate "
        f"{ratios['hit_rate'] * 100:+.1f} points.",
    ]


def _idle(title: str, systems: Figures) -> str:
    rows = [
        f"| {name} | {row['cores']:.1%} | {_shares(row['cores_by_role'])} | {row['memory_mib']:,} "
        f"| {', '.join(f'{role} {mib:,}' for role, mib in row['memory_mib_by_role'].items())} |"
        for name, row in systems.items()
    ]
    head = "| system | of a core | by process | MiB | by process |\n|---|---|---|---|---|"
    return "\n".join([f"## {title}", "", head, *rows])


def _shares(roles: Mapping[str, float]) -> str:
    return ", ".join(f"{role} {cores:.2%}" for role, cores in roles.items())


def write(results: Results, model: str, *, name: str, folder: Path) -> Path:
    figures = figures_of(results)
    return write_report(
        name,
        title=TITLE,
        text=text_of(figures, model),
        figures=figures,
        floors=floors_of(figures),
        versions={"torch": version("torch"), "ray": version("ray")},
        folder=folder,
    )
