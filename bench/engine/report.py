"""Report of the engine benchmark: its text, and writing it. figures.py computes the figures."""

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
INTRODUCTION = f"""Each system is a process of its own with the same checkpoint. They run one after the other, repeat by
repeat, and each repeat has other tokens. All decode greedily to exactly the requested length. `First` is the time from
a request's arrival to its first token. `Token` is the mean time between two tokens of a request, `pause` the longest.
`A core-second` is output tokens per second of a core that the system used, including spinning threads. `Foreign cores`
were used by other programs and, on a virtual machine, by other machines. A ratio is our output tokens/s over the
other's, for pairs in the same repeat. It is the median of pairs with at most {DISTURBING_CORES} foreign cores if there
are {MIN_PAIRS} of them, otherwise of all pairs. In brackets are the lowest and highest ratio and the number of
undisturbed pairs; `all` means that all pairs count. A ratio below {UNDECIDED} and above {1 / UNDECIDED:.2f} decides
nothing, because the machine drifts."""
HEAD = (
    "| system | output tokens/s | lowest-highest | a core-second | first ms p50 / p99 | token ms p50 / p99 "
    "| pause ms p50 / p99 | cores | foreign cores | same first tokens |\n|---|---|---|---|---|---|---|---|---|---|"
)


CUT_SHORT = " **Cut short: later repeats or workloads are missing.**"


def text_of(figures: Figures) -> str:
    parts = [INTRODUCTION, _setting(figures)]
    for dtype, run in figures["runs"].items():
        has_roofline = any(workload["of_roofline"] for workload in run["workloads"].values())
        parts += [f"## {dtype}", _systems(run), *([_machine(run["machine"])] if has_roofline else [])]
        parts += [_workload(f"{name}, {dtype}", workload) for name, workload in run["workloads"].items()]
    if missed := not_judged(figures):
        parts.append(
            "\n".join(
                [
                    "Not judged, because a workload, a system or repeats are missing:",
                    "",
                    *(f"- {m}" for m in missed),
                ]
            )
        )
    return "\n\n".join(parts)


def _setting(figures: Figures) -> str:
    few = f" **Fewer than {MIN_REPEATS} repeats: too few for a claim.**"
    return (
        f"Model {figures['model']}, on {figures['device_name']}, {figures['threads']} threads, "
        f"{figures['repeats']} repeats.{few if figures['repeats'] < MIN_REPEATS else ''} "
        f"Proven before: {figures['proven']}.{CUT_SHORT if figures.get('cut_short') else ''}"
    )


def _machine(rates: Figures) -> str:
    return (
        f"The roofline counts all prompts at the matmul rate, in the model's data type. Then it counts decode steps at "
        f"max(weight bytes / B, FLOPs / F) + KV bytes / B. A prefix of all prompts counts once. The head counts "
        f"only for last positions. B, the copy bandwidth, is {rates['copy_gb_per_second']:,.1f} GB/s and F, the matmul "
        f"rate, is {rates['matmul_tflops_per_second']:.3g} TFLOP/s, measured before the first system started. Prompts "
        f"beside decodes, CPU caches and numbers in 8 bits can exceed it."
    )


def _systems(run: Figures) -> str:
    lines = []
    for name, row in run["systems"].items():
        if "absent" in row:
            lines.append(f"- {name}: not measured ({row['absent']}).")
            continue
        versions = ", ".join(f"{package} {version}" for package, version in row["versions"].items())
        notes = f"; {row['notes']}" if row["notes"] else ""
        notes += f"; **failed**: {row['failed']}" if "failed" in row else ""
        lines.append(f"- {name}: {versions}; ready after {row['load_seconds']:.1f} s{notes}.")
    if run["kv_gib"]:
        lines += ["", f"Each has a KV cache of {run['kv_gib']:g} GiB."]
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
        ["", f"Shares of the roofline, {workload[ROOFLINE_RATE]:,.0f} tokens/s: {', '.join(shares)}."]
        if shares
        else []
    )


def _ratios(ratios: Mapping[str, Mapping[str, Figures]], systems: Sequence[str]) -> list[str]:
    """Make a table with our systems as rows and all systems as columns."""
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


def write(figures: Figures, folder: Path, *, unproven: str = "") -> Path:
    return write_report(
        figures["report"],
        title=TITLE,
        text=text_of(figures),
        figures={**figures, "not_judged": not_judged(figures)},
        floors=floors_of(figures),
        versions=_own_versions(figures),
        folder=folder,
        unproven=unproven,
        is_cut_short=figures.get("cut_short", False),
    )


def _own_versions(figures: Figures) -> dict[str, str]:
    """Return the versions of our own systems. The text has those of the peers."""
    return {
        package: version
        for run in figures["runs"].values()
        for name in run["ours"]
        for package, version in run["systems"][name].get("versions", {}).items()
    }
