"""Prometheus' own checker reads our rules, questions and configuration, and judges each alert.

Each fires when it should, and stays quiet when it should.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from blockyard.deploy.grafana.vllm_rules import PATH, rules
from blockyard.proto.metrics.readings import Kind, Metric

from tests.unit.metrics.tables import EXPRESSIONS, NAMED, SERVICES, mounts

from .alert_cases import CASES, STEP_SECONDS, AlertCase, Series
from .promtool import ALERTS, GRAFANA, needs_prometheus, promtool

pytestmark = needs_prometheus


def check(kind: str, path: Path) -> str:
    """Return what promtool says of a file that it takes."""
    checked = promtool("check", kind, str(path))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    return checked.stdout


def judge(path: Path, rules: Path, seconds: int, *tests: dict[str, Any]) -> None:
    """Run promtool's unit tests of rules."""
    asked = {"rule_files": [str(rules)], "evaluation_interval": f"{seconds}s", "tests": [*tests]}
    path.write_text(yaml.safe_dump(asked), encoding="utf-8")
    judged = promtool("test", "rules", str(path))
    assert judged.returncode == 0, judged.stdout + judged.stderr


def look(case: AlertCase, series: Series, num_firing: int) -> dict[str, Any]:
    """One of promtool's unit tests."""
    expression = f'count(ALERTS{{alertname="{case.alert}",alertstate="firing"}})'
    samples = [{"labels": "{}", "value": num_firing}] if num_firing else []
    return {
        "interval": f"{STEP_SECONDS}s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": expression, "eval_time": f"{int(case.minutes * 60)}s", "exp_samples": samples}
        ],
    }


def of_cluster(series: Series, cluster: str) -> Series:
    return {name.replace("{", f'{{cluster="{cluster}",', 1): values for name, values in series.items()}


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    assert [case.alert for case in CASES] == [rule["alert"] for rule in alert_rules()]


def alert_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_rules_questions_and_scrape_configurations_are_valid(tmp_path: Path) -> None:
    for name in ("alerts.yaml", "prometheus.yaml"):
        shutil.copy(GRAFANA / name, tmp_path)
    for name in ("targets.json", "ray-targets.json"):
        (tmp_path / name).write_text("[]", encoding="utf-8")
    assert f"{len(alert_rules())} rules found" in check("config", tmp_path / "prometheus.yaml")
    (option,) = (one for one in SERVICES["prometheus"]["command"] if one.startswith("--config.file="))
    inside = Path(option.partition("=")[2])
    folder = shutil.copytree(mounts("prometheus")[str(inside.parent)], tmp_path / "mounted")
    assert "rules found" in check("config", folder / inside.name)
    check("rules", PATH)
    asked = [
        {"record": f"question:{number}", "expr": expression.replace("$__rate_interval", "1m")}
        for number, expression in enumerate(EXPRESSIONS)
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "questions", "rules": asked}]}), encoding="utf-8")
    assert f"{len(EXPRESSIONS)} rules found" in check("rules", path)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.alert))
def test_an_alert_fires_when_it_should_and_only_then(case: AlertCase, tmp_path: Path) -> None:
    """A sound cluster does not hide another one's alert. It is first in the sum, and has the names of the other's
    routers and workers."""
    tests = [look(case, case.firing, 1), look(case, case.quiet, 0)]
    if case.alert != "BlockyardNoRouters":
        both = look(case, of_cluster(case.quiet, "sound") | of_cluster(case.firing, "sick"), 1)
        firing = f'count(ALERTS{{alertname="{case.alert}",alertstate="firing",cluster'
        both["promql_expr_test"][0]["expr"] = f'{firing}="sick"}}) unless {firing}!="sick"}})'
        tests.append(both)
    judge(tmp_path / "cases.yaml", ALERTS, STEP_SECONDS, *tests)


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


def test_each_series_has_vllms_name_and_labels(tmp_path: Path) -> None:
    judge(tmp_path / "cases.yaml", PATH, 5, *map(of_a_table_row, NAMED))
