"""Shows the live page in the Metrics tab of Ray's dashboard, on a head without Grafana. Opt-in: it replaces all charts.

That tab is an iframe of a Grafana, shown once Grafana and Prometheus pass a health check. Here the dashboard itself
answers both health checks, and the iframes lead to the page. Owns Ray's variables for this, the answers, and the target
of each iframe. Loaded by the dashboard's starter, so it imports very little.
"""

from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlencode

TAB_VARIABLE = "BLOCKYARD_LIVE_PAGE_IN_METRICS_TAB"
"""Environment variable of a head: 1 puts the page into that tab."""
GRAFANA_VARIABLE = "RAY_GRAFANA_HOST"
PROMETHEUS_VARIABLE = "RAY_PROMETHEUS_HOST"
STAND_IN_PATH = "/static/blockyard"
"""Path below /static/, where Ray's dashboard requires no token, because Ray's health checks send none. The answers
reveal nothing."""
CORE_UID = "rayDefaultDashboard"
"""Ray's uid of the dashboard that the tab shows first, and of the charts on its Overview."""
UTILIZATION_PANEL = "41"
"""Ray's id of the chart of the cluster's utilization on the Overview."""
ANSWERS: dict[str, dict[str, Any]] = {
    "grafana/api/health": {"database": "ok"},
    # An empty result for any query. Ray 2.60 uses it as Prometheus's health check, Ray 2.52 the next one.
    "prometheus/api/v1/query": {"status": "success", "data": {"resultType": "vector", "result": []}},
    "prometheus/-/healthy": {"status": "success"},
}


def is_asked_for(environment: Mapping[str, str]) -> bool:
    return environment.get(TAB_VARIABLE, "") == "1"


def tab_environment(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables for the dashboard that is started with `arguments`, and for no other process.

    Return none if TAB_VARIABLE does not ask for the page in that tab. Raise ValueError if a Grafana is configured.
    """
    if not is_asked_for(environment):
        return {}
    if GRAFANA_VARIABLE in environment:
        raise ValueError(f"{TAB_VARIABLE} is for a head without Grafana, and {GRAFANA_VARIABLE} names one")
    flags = dict(argument.removeprefix("--").partition("=")[::2] for argument in arguments)
    host = "127.0.0.1" if _is_any_of_ours(flags["host"]) else flags["host"]
    here = f"http://{f'[{host}]' if ':' in host else host}:{flags['port']}{STAND_IN_PATH}"
    return {
        GRAFANA_VARIABLE: f"{here}/grafana",
        PROMETHEUS_VARIABLE: environment.get(PROMETHEUS_VARIABLE, f"{here}/prometheus"),
        # Relative, because the dashboard may be behind a proxy that adds to its paths.
        "RAY_GRAFANA_IFRAME_HOST": "blockyard",
        "RAY_GRAFANA_DEFAULT_DASHBOARD_UID": CORE_UID,
    }


def _is_any_of_ours(host: str) -> bool:
    """Tell whether the dashboard listens on every interface, or on localhost."""
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return host == "localhost"


def frame_target(path: str, query: Mapping[str, str]) -> str | None:
    """Return the target of an iframe of Ray's dashboard, relative to its own address. None for any other path.

    The tab leads to the page. The chart of the cluster's utilization leads to the page's numbers. Any other chart leads
    to an explanation.
    """
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
