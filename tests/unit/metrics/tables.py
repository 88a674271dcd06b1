"""Questions of the dashboard, rules of the alerts, and the services of deploy/compose.yaml."""

from pathlib import Path
from typing import Any

import yaml
from blockyard.deploy.grafana.panels import ROWS
from blockyard.proto.metrics.table import METRICS

GRAFANA = Path(__file__).parents[3] / "deploy" / "grafana"
EXPRESSIONS = [expression for row in ROWS for panel in row.panels for expression, _ in panel.queries]
NAMED = [metric for metric in METRICS if metric.vllm]
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((GRAFANA / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
COMPOSE = GRAFANA.parent / "compose.yaml"
SPEC: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = SPEC["services"]


def mounts(service: str) -> dict[str, Path]:
    """Files and folders of ours, by where the container has them."""
    parts = (volume.split(":") for volume in SERVICES[service]["volumes"])
    return {there: COMPOSE.parent / here for here, there, *_ in parts if here.startswith("./")}
