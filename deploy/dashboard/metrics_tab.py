"""The live page in the Metrics tab of Ray's dashboard, on a head without Grafana. Opt-in: Ray's own charts give way.

That tab is a frame of a Grafana, shown once this and a Prometheus say that they are well. Here the dashboard says so of
itself, and the frames lead to the page. Owns the variables that tell Ray, what is answered in place of both, and where
each frame leads. Loaded by the dashboard's starter, so it imports next to nothing.
"""

from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlencode

TAB_VARIABLE = "BLOCKYARD_LIVE_PAGE_IN_METRICS_TAB"
"""In the environment of a head: 1 for the page in that tab."""
GRAFANA_VARIABLE = "RAY_GRAFANA_HOST"
PROMETHEUS_VARIABLE = "RAY_PROMETHEUS_HOST"
STAND_IN_PATH = "/static/blockyard"
"""What Ray asks it asks without a token, and below /static/ its dashboard wants none. Nothing is told there."""
CORE_UID = "rayDefaultDashboard"
"""Ray's own name for what the tab shows first, and for the charts on its Overview."""
UTILIZATION_PANEL = "41"
"""Ray's name for the chart of the cluster's utilization on the Overview."""
ANSWERS: dict[str, dict[str, Any]] = {
    "grafana/api/health": {"database": "ok"},
    # To any question, as one that has no series.
    # Ray 2.60 asks it whether Prometheus is well; Ray 2.52 asks the other one.
    "prometheus/api/v1/query": {"status": "success", "data": {"resultType": "vector", "result": []}},
    "prometheus/-/healthy": {"status": "success"},
}


def is_asked_for(environment: Mapping[str, str]) -> bool:
    return environment.get(TAB_VARIABLE, "") == "1"


def tab_environment(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """What the dashboard that is started with `arguments` needs, and no other process. Raises ValueError."""
    if not is_asked_for(environment):
        return {}
    if GRAFANA_VARIABLE in environment:
        raise ValueError(f"{TAB_VARIABLE} is for a head without Grafana, and {GRAFANA_VARIABLE} names one")
    told = dict(argument.removeprefix("--").partition("=")[::2] for argument in arguments)
    host = "127.0.0.1" if _is_any_of_ours(told["host"]) else told["host"]
    here = f"http://{f'[{host}]' if ':' in host else host}:{told['port']}{STAND_IN_PATH}"
    return {
        GRAFANA_VARIABLE: f"{here}/grafana",
        PROMETHEUS_VARIABLE: environment.get(PROMETHEUS_VARIABLE, f"{here}/prometheus"),
        # Relative: the dashboard may be behind a proxy that adds to its paths.
        "RAY_GRAFANA_IFRAME_HOST": "blockyard",
        "RAY_GRAFANA_DEFAULT_DASHBOARD_UID": CORE_UID,
    }


def _is_any_of_ours(host: str) -> bool:
    """The dashboard listens on every interface of this machine, or on what it calls itself."""
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return host == "localhost"


def frame_target(path: str, query: Mapping[str, str]) -> str | None:
    """Where a frame of Ray's dashboard leads, relative to its own address; None for what is no frame. The tab to the
    page, the chart of the cluster's utilization to the page's numbers, all else to a sentence."""
    kind, _, rest = path.partition("/")
    if kind not in ("d", "d-solo"):
        return None
    asked = {name: query[name] for name in ("theme",) if name in query}
    up, uid = "../" * (path.count("/") + 1), rest.partition("/")[0]
    if uid == CORE_UID and kind == "d":
        return f"{up}blockyard?{urlencode(asked)}"
    if uid == CORE_UID and query.get("panelId") == UTILIZATION_PANEL:
        return f"{up}blockyard?{urlencode({**asked, 'view': 'numbers'})}"
    return f"{up}blockyard/no-chart.html?{urlencode(asked)}"
