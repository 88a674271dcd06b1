"""`python -m blockyard.deploy.grafana.dashboard`: writes dashboard.json, which Grafana imports, from panels.py.

Owns the layout and look of panels. The datasource is a variable, because Ray's Metrics tab passes its own.
"""

import json
from pathlib import Path
from typing import Any

from blockyard.deploy.grafana.panels import ROWS, Panel

UID = "blockyard"
PATH = Path(__file__).parent / "dashboard.json"
PANELS_A_ROW = 3
WIDTH = 24 // PANELS_A_ROW
HEIGHT = 8
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    return {
        "uid": UID,
        "title": "Blockyard",
        "tags": ["blockyard", "ray"],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": 41,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                _datasource_variable(),
                _label_variable("cluster", "Cluster", "label_values(blockyard_workers, cluster)"),
                _label_variable(
                    "model",
                    "Model",
                    'label_values(blockyard_workers{cluster="$cluster"}, model_name)',
                    has_all=True,
                ),
                *(
                    _label_variable(
                        side,
                        side.capitalize(),
                        f'label_values({series}{{cluster="$cluster",model_name=~"$model"}}, {side})',
                        has_all=True,
                    )
                    for side, series in (("worker", "blockyard_running"), ("router", "blockyard_workers"))
                ),
            ]
        },
        "panels": _panels(),
    }


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "label": "Prometheus", "query": "prometheus"}


def _label_variable(name: str, label: str, query: str, *, has_all: bool = False) -> dict[str, Any]:
    """Return a variable of the dashboard, by which a user chooses a label's value, or with `has_all` any number.

    Grafana reloads the values when the time range changes.
    """
    variable = {
        "name": name,
        "type": "query",
        "label": label,
        "datasource": DATASOURCE,
        "query": query,
        "refresh": 2,
        "sort": 1,
    }
    everything = {
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    return variable | (everything if has_all else {})


def _panels() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    top = 0
    for row in ROWS:
        panels.append(_row(row.title, len(panels) + 1, top))
        top += 1
        for number, panel in enumerate(row.panels):
            left, down = number % PANELS_A_ROW, number // PANELS_A_ROW
            panels.append(_panel(panel, len(panels) + 1, left * WIDTH, top + down * HEIGHT))
        top += -(-len(row.panels) // PANELS_A_ROW) * HEIGHT
    return panels


def _row(title: str, number: int, top: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": {"h": 1, "w": 24, "x": 0, "y": top},
        "panels": [],
    }


def _panel(panel: Panel, number: int, left: int, top: int) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.is_stacked else "none", "group": "A"}
    custom = {"fillOpacity": 25 if panel.is_stacked else 8, "showPoints": "never", "stacking": stacking}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": left, "y": top},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + query), "expr": expression, "legendFormat": legend, "range": True}
            for query, (expression, legend) in enumerate(panel.queries)
        ],
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
