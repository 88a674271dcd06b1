"""The recording rules that give our series vLLM's names: generated from the table, and valid.

They name series as our processes would.
"""

from pathlib import Path

import pytest
import yaml
from blockyard.deploy.grafana.vllm_rules import PATH, document, rules
from blockyard.proto.metrics.readings import Kind, Metric
from blockyard.proto.metrics.table import METRICS

from .promtool import needs_prometheus, promtool

NAMED = [metric for metric in METRICS if metric.vllm]


def of_a_table_row(metric: Metric) -> dict[str, object]:
    """One of promtool's unit tests: all series of a metric, in two processes, come back under vLLM's names."""
    label = f',{metric.label}="{metric.values[0]}"' if metric.label else ""
    renamed = f',{metric.vllm_label}="{metric.values[0]}"' if metric.label else ""
    bound = 'le="0.5",' if metric.kind is Kind.HISTOGRAM else ""
    return {
        "interval": "5s",
        "input_series": [
            {"series": f'{series}{{{bound}cluster="c",router="r{number}"{label}}}', "values": f"{number}+1x9"}
            for series in metric.series
            for number in range(2)
        ],
        "promql_expr_test": [
            {
                "expr": name,
                "eval_time": "20s",
                "exp_samples": [
                    {
                        "labels": f'{name}{{{bound}cluster="c",router="r{number}"{renamed}}}',
                        "value": number + 4,
                    }
                    for number in range(2)
                ],
            }
            for name, _ in rules(metric)
        ],
    }


def test_the_committed_rules_are_those_of_the_table() -> None:
    assert PATH.read_text(encoding="utf-8") == document(), "run python -m blockyard.deploy.grafana.vllm_rules"
    recorded = [rule["record"] for rule in yaml.safe_load(document())["groups"][0]["rules"]]
    assert len(recorded) == len(set(recorded)) > len(NAMED)


@needs_prometheus
def test_the_rules_are_valid() -> None:
    checked = promtool("check", "rules", str(PATH))
    assert checked.returncode == 0, checked.stdout + checked.stderr


@needs_prometheus
@pytest.mark.parametrize("metric", NAMED, ids=lambda metric: str(metric.name))
def test_each_series_has_vllms_name_and_labels(metric: Metric, tmp_path: Path) -> None:
    path = tmp_path / "cases.yaml"
    test = {"rule_files": [str(PATH)], "evaluation_interval": "5s", "tests": [of_a_table_row(metric)]}
    path.write_text(yaml.safe_dump(test), encoding="utf-8")
    judged = promtool("test", "rules", str(path))
    assert judged.returncode == 0, judged.stdout + judged.stderr
