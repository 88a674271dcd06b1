"""The metrics list of docs/operating.md: `python -m tests.unit.metrics.document` generates it from the code.

What is normal, and what to do otherwise, stands behind a metric's meaning. It is written by hand and kept.
"""

import re
from pathlib import Path

from blockyard.proto.metrics.readings import Metric
from blockyard.proto.metrics.table import METRICS, OUTCOMES

PATH = Path(__file__).parents[3] / "docs" / "operating.md"
BEGIN, END = (f"<!-- the table of proto/metrics/table.py: {word} -->\n" for word in ("begin", "end"))
ADVICE = re.compile(r"^- `(\w+)` .*? Normal: (.*)$", re.MULTILINE)


def with_table(document: str) -> str:
    before, _, rest = document.partition(BEGIN)
    advice = dict(ADVICE.findall(rest.partition(END)[0]))
    rows = "".join(_row(metric, advice.get(metric.name, "")) for metric in METRICS)
    return before + BEGIN + rows + END + rest.partition(END)[2]


def _row(metric: Metric, advice: str) -> str:
    label = f"; {_label(metric)}" if metric.label else ""
    told = f"{metric.meaning} Normal: {advice}" if advice else metric.meaning
    return f"- `{metric.name}` ({metric.kind.value}, {metric.unit}{label}): {told}\n"


def _label(metric: Metric) -> str:
    if metric.most_values:
        return f"`{metric.label}`: {metric.most_values} at most, see below"
    values = "see below" if metric.values == OUTCOMES else ", ".join(metric.values)
    return f"`{metric.label}`: {values}"


if __name__ == "__main__":
    PATH.write_text(with_table(PATH.read_text(encoding="utf-8")), encoding="utf-8")
