"""The alert rules: each fires when it should, stays quiet when it should, and has an entry in docs/operating.md."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from .alert_cases import CASES, STEP_SECONDS, AlertCase, Series
from .promtool import ALERTS, GRAFANA, needs_prometheus, promtool

RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]
]
OPERATING = Path(__file__).parents[3] / "docs" / "operating.md"


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
    assert [case.alert for case in CASES] == [rule["alert"] for rule in RULES]


@needs_prometheus
def test_rules_and_scrape_configuration_are_valid(tmp_path: Path) -> None:
    for name in ("alerts.yaml", "prometheus.yaml"):
        (tmp_path / name).write_text((GRAFANA / name).read_text(encoding="utf-8"), encoding="utf-8")
    for name in ("targets.json", "ray-targets.json"):
        (tmp_path / name).write_text("[]", encoding="utf-8")
    checked = promtool("check", "config", str(tmp_path / "prometheus.yaml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(RULES)} rules found" in checked.stdout


@pytest.mark.quick_cases(2)
@needs_prometheus
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.alert))
def test_an_alert_fires_when_it_should_and_only_then(case: AlertCase, tmp_path: Path) -> None:
    path = tmp_path / "cases.yaml"
    tests = [look(case, case.firing, 1), look(case, case.quiet, 0)]
    path.write_text(
        yaml.safe_dump(
            {"rule_files": [str(ALERTS)], "evaluation_interval": f"{STEP_SECONDS}s", "tests": tests}
        ),
        encoding="utf-8",
    )
    judged = promtool("test", "rules", str(path))
    assert judged.returncode == 0, judged.stdout + judged.stderr


@pytest.mark.quick_cases(4)
@needs_prometheus
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.alert != "BlockyardNoRouters"], ids=lambda case: str(case.alert)
)
def test_a_sound_cluster_does_not_hide_another_ones_alert(case: AlertCase, tmp_path: Path) -> None:
    """The sound one is first in the sum, and has the names of the other's routers and workers."""
    path = tmp_path / "cases.yaml"
    both = of_cluster(case.quiet, "sound") | of_cluster(case.firing, "sick")
    test = look(case, both, 1)
    test["promql_expr_test"][0]["expr"] = (
        f'count(ALERTS{{alertname="{case.alert}",alertstate="firing",cluster="sick"}}) '
        f'unless count(ALERTS{{alertname="{case.alert}",alertstate="firing",cluster!="sick"}})'
    )
    path.write_text(
        yaml.safe_dump(
            {"rule_files": [str(ALERTS)], "evaluation_interval": f"{STEP_SECONDS}s", "tests": [test]}
        ),
        encoding="utf-8",
    )
    judged = promtool("test", "rules", str(path))
    assert judged.returncode == 0, judged.stdout + judged.stderr


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_an_alert_says_how_bad_it_is_and_has_an_entry_in_the_document(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["runbook"] == f"docs/operating.md#{rule['alert'].lower()}"
    assert f"\n### {rule['alert']}\n" in OPERATING.read_text(encoding="utf-8")
