"""dashboard.json matches panels.py, fits Grafana's own types, and holds valid Prometheus queries."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from blockyard.deploy.grafana import dashboard
from blockyard.deploy.grafana.panels import ROWS
from blockyard.proto.metrics.table import METRICS
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from .promtool import ALERTS, needs_prometheus, promtool

DASHBOARD: dict[str, Any] = json.loads(dashboard.PATH.read_text(encoding="utf-8"))
EXPRESSIONS = [expression for row in ROWS for panel in row.panels for expression, _ in panel.queries]
SERIES = {name: metric for metric in METRICS for name in metric.series}


def alert_expressions() -> list[str]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def lost(written: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Yield what Grafana's types dropped or changed. Values that they add by default do not count."""
    if isinstance(written, dict) and isinstance(kept, dict):
        for key, value in written.items():
            yield from lost(value, kept.get(key), f"{path}.{key}")
    elif isinstance(written, list) and isinstance(kept, list) and len(written) == len(kept):
        for number, value in enumerate(written):
            yield from lost(value, kept[number], f"{path}[{number}]")
    elif written != kept:
        yield f"{path}: {written!r} became {kept!r}"


def through_grafana(written: dict[str, Any]) -> Any:
    register_default_plugins()
    return json.loads(json.dumps(Dashboard.from_json(written), cls=JSONEncoder))


def test_the_file_is_what_the_panels_say() -> None:
    assert dashboard.PATH.read_text(encoding="utf-8") == dashboard.text(), (
        "run python -m blockyard.deploy.grafana.dashboard"
    )


def test_grafanas_own_types_keep_every_field_of_it() -> None:
    assert list(lost(DASHBOARD, through_grafana(DASHBOARD))) == []


@pytest.mark.parametrize("place", ["dashboard", "panel", "options", "target"])
def test_a_field_that_grafana_does_not_know_would_be_found(place: str) -> None:
    broken = json.loads(json.dumps(DASHBOARD))
    panel = broken["panels"][1]
    {"dashboard": broken, "panel": panel, "options": panel["options"], "target": panel["targets"][0]}[place][
        "colour"
    ] = "red"
    assert len(list(lost(broken, through_grafana(broken)))) == 1


def test_rays_metrics_tab_finds_it_by_its_uid_and_gives_it_the_datasource() -> None:
    assert DASHBOARD["uid"] == "blockyard"
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == [
        "datasource",
        "cluster",
        "model",
        "worker",
        "router",
    ]
    drawn = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert {panel["datasource"]["uid"] for panel in drawn} == {"${datasource}"}


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert all(x < 24 for x, _ in cells)
        taken |= cells


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_series_of_a_panel_is_of_the_chosen_cluster_and_models(expression: str) -> None:
    asked = re.findall(r"\bblockyard_\w+(\{[^}]*\})?", expression)
    assert asked
    for matchers in asked:
        assert re.fullmatch(
            r'\{cluster="\$cluster",model_name=~"\$model",(?:worker=~"\$worker"|router=~"\$router")\}',
            matchers,
        )


def test_the_variables_ask_for_labels_and_one_cluster_at_a_time() -> None:
    _, cluster, model, worker, router = DASHBOARD["templating"]["list"]
    assert cluster["query"] == "label_values(blockyard_workers, cluster)"
    assert model["query"] == 'label_values(blockyard_workers{cluster="$cluster"}, model_name)'
    assert not cluster.get("multi")
    assert not cluster.get("includeAll")
    for variable in (model, worker, router):
        assert (variable["includeAll"], variable["allValue"]) == (True, ".*")
    assert (
        worker["query"] == 'label_values(blockyard_running{cluster="$cluster",model_name=~"$model"}, worker)'
    )
    assert (
        router["query"] == 'label_values(blockyard_workers{cluster="$cluster",model_name=~"$model"}, router)'
    )


def test_the_new_metrics_are_drawn() -> None:
    drawn = {name for expression in EXPRESSIONS for name in re.findall(r"blockyard_\w+", expression)}
    tenants = {name for metric in METRICS if metric.label == "tenant" for name in metric.series}
    per_request = ("prefill_seconds", "decode_seconds", "request_prompt_tokens", "request_generated_tokens")
    assert drawn >= tenants | {f"blockyard_{name}_bucket" for name in per_request}


@pytest.mark.parametrize("expression", [*EXPRESSIONS, *alert_expressions()])
def test_a_question_names_only_series_labels_and_values_of_the_table(expression: str) -> None:
    names = re.findall(r"\bblockyard_\w+", expression)
    assert names
    assert set(names) <= set(SERIES), set(names) - set(SERIES)
    for name, matchers in re.findall(r"\b(blockyard_\w+)\{([^}]*)\}", expression):
        for label, values in re.findall(r'(\w+)=~?"([^"]*)"', matchers):
            if values == f"${label.removesuffix('_name')}":
                continue
            assert label == SERIES[name].label
            assert set(values.split("|")) <= set(SERIES[name].values)


@needs_prometheus
def test_every_question_parses(tmp_path: Path) -> None:
    rules = [
        {"record": f"question:{number}", "expr": expression.replace("$__rate_interval", "1m")}
        for number, expression in enumerate(EXPRESSIONS)
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "questions", "rules": rules}]}), encoding="utf-8")
    judged = promtool("check", "rules", str(path))
    assert judged.returncode == 0, judged.stdout + judged.stderr
    assert f"{len(EXPRESSIONS)} rules found" in judged.stdout


@pytest.mark.parametrize("expression", [*EXPRESSIONS, *alert_expressions()])
def test_counters_are_only_asked_how_they_grow(expression: str) -> None:
    """On Ray those of a dead worker stay, at their last value."""
    counters = re.findall(r"blockyard_\w+_total", expression)
    growing = re.findall(r"(?:rate|increase)\((blockyard_\w+_total)", expression)
    assert counters == growing
