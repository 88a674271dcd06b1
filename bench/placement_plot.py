"""The placement report's picture: reuse and time to first token, policy by policy."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from bench.placement_text import POLICIES, Findings


def draw(findings: Findings, path: Path) -> None:
    labels = [load.label for load in findings.loads]
    figure, panels = plt.subplots(2, 1, figsize=(13, 8), sharex=True)
    width = 0.8 / len(POLICIES)
    for number, policy in enumerate(POLICIES):
        places = [position + (number - (len(POLICIES) - 1) / 2) * width for position in range(len(labels))]
        for panel, figure_name, factor in zip(panels, ("reuse", "ttft_mean"), (1, 1000), strict=True):
            heights = [factor * findings.table.mean(label, policy, figure_name) for label in labels]
            panel.bar(places, heights, width, label=policy)
    for position, label in enumerate(labels):
        ideal = findings.table.mean(label, "prefix", "ideal_reuse")
        panels[0].hlines(ideal, position - 0.45, position + 0.45, colors="black", linestyles="dotted")
    panels[0].set_ylabel("reuse (dotted: ideal)")
    panels[1].set_ylabel("mean time to first token, ms")
    panels[1].set_yscale("log")
    panels[1].set_xticks(range(len(labels)), [label.replace(" ", "\n", 1) for label in labels], fontsize=8)
    panels[0].legend(ncols=len(POLICIES), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
