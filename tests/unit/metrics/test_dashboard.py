"""Documents for operators: dashboard.json, the alerts, vLLM's names, deploy/compose.yaml and docs/operating.md.

Each matches the table of metrics, or the code that it is made from.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from blockyard.deploy.cli import main
from blockyard.deploy.grafana import dashboard
from blockyard.deploy.grafana.vllm_rules import PATH as RULES_PATH
from blockyard.deploy.grafana.vllm_rules import document as vllm_document
from blockyard.proto.metrics.readings import Kind
from blockyard.proto.metrics.table import METRICS, ROUTER_METRICS, WORKER_METRICS
from click import Command, Group
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from .document import ADVICE, PATH, with_table
from .tables import EXPRESSIONS, NAMED, RULES, SERVICES, SPEC, mounts

DASHBOARD: dict[str, Any] = json.loads(dashboard.PATH.read_text(encoding="utf-8"))
SERIES = {name: metric for metric in METRICS for name in metric.series}


QUESTIONS = [*EXPRESSIONS, *(rule["expr"] for rule in RULES)]


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


def test_a_field_that_grafana_does_not_know_would_be_found() -> None:
    broken = json.loads(json.dumps(DASHBOARD))
    panel = broken["panels"][1]
    for place in (broken, panel, panel["options"], panel["targets"][0]):
        place["colour"] = "red"
    assert len(list(lost(broken, through_grafana(broken)))) == 4


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


@pytest.mark.parametrize("expression", QUESTIONS)
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


@pytest.mark.parametrize("expression", QUESTIONS)
def test_counters_are_only_asked_how_they_grow(expression: str) -> None:
    """On Ray those of a dead worker stay, at their last value."""
    counters = re.findall(r"blockyard_\w+_total", expression)
    growing = re.findall(r"(?:rate|increase)\((blockyard_\w+_total)", expression)
    assert counters == growing


def test_the_committed_rules_are_those_of_the_table() -> None:
    assert RULES_PATH.read_text(encoding="utf-8") == vllm_document(), (
        "run python -m blockyard.deploy.grafana.vllm_rules"
    )
    recorded = [rule["record"] for rule in yaml.safe_load(vllm_document())["groups"][0]["rules"]]
    assert len(recorded) == len(set(recorded)) > len(NAMED)


@pytest.mark.parametrize("service", SERVICES)
def test_images_are_pinned_and_mounts_are_there_and_read_only(service: str) -> None:
    assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", SERVICES[service]["image"])
    assert mounts(service)
    assert all(path.exists() for path in mounts(service).values())
    for volume in SERVICES[service]["volumes"]:
        here, *_, mode = volume.split(":")
        assert mode == "ro" if here.startswith("./") else here in SPEC["volumes"], volume


def test_both_listen_on_loopback_alone_and_no_password_is_given() -> None:
    prometheus, grafana = SERVICES["prometheus"]["command"], SERVICES["grafana"]["environment"]
    assert "--web.listen-address=127.0.0.1:9090" in prometheus
    assert grafana["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert grafana["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")
    assert all("ports" not in service for service in SERVICES.values())


def test_grafana_finds_our_dashboard_and_prometheus() -> None:
    there = mounts("grafana")
    provisioning = there["/etc/grafana/provisioning"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "blockyard.yaml").read_text())["providers"]
    (mounted,) = (place for place, path in there.items() if path.resolve() == dashboard.PATH.resolve())
    assert Path(mounted).parent == Path(provider["options"]["path"])
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == (
        "prometheus",
        "http://127.0.0.1:9090",
        True,
    )


DOCUMENT = PATH.read_text(encoding="utf-8")


def anchors() -> set[str]:
    """Return the anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", DOCUMENT, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def options_below(command: Command) -> set[str]:
    below = command.commands.values() if isinstance(command, Group) else ()
    own = {option for parameter in command.params for option in parameter.opts}
    return own.union(*map(options_below, below))


def test_its_table_is_that_of_the_code() -> None:
    assert with_table(DOCUMENT) == DOCUMENT, "run python -m tests.unit.metrics.document"


def test_its_table_of_vllms_names_has_those_that_are_served_and_from_where() -> None:
    served = {
        (f"{name}_total" if metric.kind is Kind.COUNTER else name, kind)
        for kind, table in (("router", ROUTER_METRICS), ("worker", WORKER_METRICS))
        for metric in table
        for name in metric.vllm
    }
    assert set(re.findall(r"^\| `(vllm:\w+)` \| (\w+) \|", DOCUMENT, re.MULTILINE)) == served


def test_it_says_of_each_metric_what_is_normal_in_the_tables_order() -> None:
    assert [name for name, _ in ADVICE.findall(DOCUMENT)] == [metric.name for metric in METRICS]


def test_its_links_lead_somewhere() -> None:
    inside = set(re.findall(r"\]\(#([\w-]+)\)", DOCUMENT))
    assert inside <= anchors(), inside - anchors()
    for path in re.findall(r"\]\(([^#)][^)]*)\)", DOCUMENT):
        assert (PATH.parent / path).exists(), path


@pytest.mark.parametrize("line", sorted(set(re.findall(r"`blockyard ([a-z][^`]*)`", DOCUMENT))))
def test_a_command_that_it_names_exists_with_its_options(line: str) -> None:
    command: object = main
    for word in line.split():
        if isinstance(command, Group):
            assert word in command.commands, word
            command = command.commands[word]
    options = {option for parameter in command.params for option in parameter.opts}  # type: ignore[attr-defined]
    assert set(re.findall(r"--[a-z-]+", line)) <= options


def test_an_option_that_it_names_is_one_of_ours() -> None:
    processes = {"--metrics-port", "--router-id", "--config"}
    assert set(re.findall(r"(?<![\w<!-])--[a-z][a-z-]+", DOCUMENT)) <= options_below(main) | processes


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_an_alert_says_how_bad_it_is_and_has_an_entry_in_the_document(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["runbook"] == f"docs/operating.md#{rule['alert'].lower()}"
    assert f"\n### {rule['alert']}\n" in DOCUMENT
