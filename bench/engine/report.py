"""The engine benchmark's report as text, and its writing. Owns the words; the figures are from figures.py."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.engine.figures import (
    DISTURBING_CORES,
    MIN_PAIRS,
    MIN_REPEATS,
    ROOFLINE_RATE,
    UNDECIDED,
    Figures,
    floors_of,
    not_judged,
)
from bench.reporting import write_report

TITLE = "The engine alone, through the cluster's path, and beside its peers"
INTRODUCTION = f"""Each system is a process of its own that has loaded the same checkpoint; they are asked in turn, one
after the other, repeat by repeat, and each repeat has other tokens. All answer greedily and go on to the asked length.
`First` is from a request's arrival to its first token, `token` the mean time between two tokens of a request, `pause`
the longest between two of its tokens; `a core-second` is output tokens for each second of a core that the system took,
waiting threads that spin among it; `foreign cores` were taken by other programs and, on a virtual machine, by others.
A ratio is ours over the other's output tokens/s, of pairs in the same repeat: the median of those beside which foreign
cores stayed at {DISTURBING_CORES} or less, if there are {MIN_PAIRS} of them, otherwise of all. In brackets are the
lowest and highest, how many pairs were undisturbed, and `all` where all count. Under {UNDECIDED} (or over
{1 / UNDECIDED:.2f}) it is undecided on a machine that drifts."""
HEAD = (
    "| system | output tokens/s | lowest-highest | a core-second | first ms p50 / p99 | token ms p50 / p99 "
    "| pause ms p50 / p99 | cores | foreign cores | same first tokens |\n|---|---|---|---|---|---|---|---|---|---|"
)


def text_of(figures: Figures) -> str:
    parts = [INTRODUCTION, _setting(figures)]
    for dtype, run in figures["runs"].items():
        has_roofline = any(workload["of_roofline"] for workload in run["workloads"].values())
        parts += [f"## {dtype}", _systems(run), *([_machine(run["machine"])] if has_roofline else [])]
        parts += [_workload(f"{name}, {dtype}", workload) for name, workload in run["workloads"].items()]
    if missed := not_judged(figures):
        parts.append(
            "\n".join(
                ["Not judged, for want of a workload, a system or repeats:", "", *(f"- {m}" for m in missed)]
            )
        )
    return "\n\n".join(parts)


def _setting(figures: Figures) -> str:
    few = f" **Fewer than {MIN_REPEATS} repeats: for a look, not for a claim.**"
    return (
        f"Model {figures['model']}, on {figures['device_name']}, {figures['threads']} threads, "
        f"{figures['repeats']} repeats.{few if figures['repeats'] < MIN_REPEATS else ''} "
        f"Proven before: {figures['proven']}."
    )


def _machine(rates: Figures) -> str:
    return (
        f"A roofline is of all prompts at the matmul rate, what they all begin with counted once and the head for "
        f"their last positions alone, and then of decode steps at max(weight bytes / B, FLOPs / F) + KV bytes / B, all "
        f"in the model's data type. B, the copy bandwidth, is {rates['copy_gb_per_second']:,.1f} GB/s and F, the "
        f"matmul rate, {rates['matmul_tflops_per_second']:.3g} TFLOP/s, measured before the first system started. "
        f"Prompts beside decodes, caches and numbers in 8 bits can do better."
    )


def _systems(run: Figures) -> str:
    lines = []
    for name, row in run["systems"].items():
        if "absent" in row:
            lines.append(f"- {name}: not measured, {row['absent']}.")
            continue
        versions = ", ".join(f"{package} {version}" for package, version in row["versions"].items())
        notes = f"; {row['notes']}" if row["notes"] else ""
        notes += f"; **failed**: {row['failed']}" if "failed" in row else ""
        lines.append(f"- {name}: {versions}; ready after {row['load_seconds']:.1f} s{notes}.")
    return "\n".join(lines)


def _workload(title: str, workload: Figures) -> str:
    rows = [
        _row(system, row, workload["equal_first_tokens"][system])
        for system, row in workload["systems"].items()
    ]
    about = f"{workload['about']} {workload['prompt_tokens']:,} tokens in, {workload['output_tokens']:,} out."
    return "\n".join(
        [
            f"### {title}",
            "",
            about,
            "",
            HEAD,
            *rows,
            "",
            *_ratios(workload["ratios"], list(workload["systems"])),
            *_of_roofline(workload),
        ]
    )


def _of_roofline(workload: Figures) -> list[str]:
    shares = [f"{name} {share:.0%}" for name, share in workload["of_roofline"].items()]
    return (
        ["", f"Of the roofline, {workload[ROOFLINE_RATE]:,.0f} tokens/s: {', '.join(shares)}."]
        if shares
        else []
    )


def _ratios(ratios: Mapping[str, Mapping[str, Figures]], systems: Sequence[str]) -> list[str]:
    """A table: ours down, all systems across."""
    columns = [system for system in systems if any(system in others for others in ratios.values())]
    lines = [
        f"| {' | '.join([ours, *(_ratio(others[other]) if other in others else '' for other in columns)])} |"
        for ours, others in ratios.items()
    ]
    return (
        [f"| ratio to | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|", *lines] if lines else []
    )


def _ratio(ratio: Figures) -> str:
    pairs = (
        f"{ratio['undisturbed']} of {ratio['pairs']}{'' if ratio['undisturbed'] >= MIN_PAIRS else ': all'}"
    )
    return f"**{ratio['median']:.2f}** ({ratio['lowest']:.2f}-{ratio['highest']:.2f}; {pairs})"


def _row(system: str, row: Figures, equal: float) -> str:
    rate = row["output_tokens_per_second"]
    cells = [
        system,
        f"{rate['median']:,.0f}",
        f"{rate['lowest']:,.0f}-{rate['highest']:,.0f}",
        f"{row['output_tokens_per_core_second']['median']:,.0f}",
        *(_pair(row[name]) for name in ("first_token_ms", "token_ms", "longest_pause_ms")),
        f"{row['cores']['median']:.2f}",
        f"{row['foreign_cores']['median']:.2f}",
        f"{equal:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def _pair(shares: Figures) -> str:
    return f"{shares['p50']:,.0f} / {shares['p99']:,.0f}" if shares else "-"


def write(figures: Figures, folder: Path) -> Path:
    return write_report(
        figures["report"],
        title=TITLE,
        text=text_of(figures),
        figures={**figures, "not_judged": not_judged(figures)},
        floors=floors_of(figures),
        versions=_own_versions(figures),
        folder=folder,
    )


def _own_versions(figures: Figures) -> dict[str, str]:
    """The peers' are in the text."""
    return {
        package: version
        for run in figures["runs"].values()
        for name in run["ours"]
        for package, version in run["systems"][name].get("versions", {}).items()
    }
