"""Ray's Metrics tab: when it redirects to the live page, and when it does not. test_on_ray.py tests its look."""

from urllib.parse import urljoin

import pytest
from blockyard.deploy.dashboard.metrics_tab import (
    GRAFANA_VARIABLE,
    PROMETHEUS_VARIABLE,
    STAND_IN_PATH,
    TAB_VARIABLE,
    frame_target,
    tab_environment,
)
from blockyard.deploy.dashboard.start_hook import HOOK_VARIABLE
from blockyard.deploy.lifecycle.preflight import problems
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.worker.config import EngineConfig

ARGUMENTS = ["/x/ray/dashboard/dashboard.py", "--host=127.0.0.1", "--port=8299", "--temp-dir=/t"]
ASKED = {TAB_VARIABLE: "1"}
NO_CHART = "/blockyard/no-chart.html?theme=dark"


@pytest.mark.parametrize(
    ("path", "query", "target"),
    [
        ("d/rayDefaultDashboard/", {"kiosk": "1"}, "/blockyard?theme=dark"),
        (
            "d-solo/rayDefaultDashboard/default-dashboard",
            {"panelId": "41"},
            "/blockyard?theme=dark&view=numbers",
        ),
        ("d-solo/rayDefaultDashboard/default-dashboard", {"panelId": "24"}, NO_CHART),
        ("d/rayDataDashboard/", {}, NO_CHART),
        ("d-solo/rayServeDashboard", {"panelId": "41"}, NO_CHART),
    ],
)
@pytest.mark.parametrize("before", ["", "/proxy/ray"])
def test_each_frame_of_rays_dashboard_leads_to_something_sensible_behind_a_proxy_too(
    before: str, path: str, query: dict[str, str], target: str
) -> None:
    found = frame_target(path, {**query, "theme": "dark"})
    assert found is not None
    assert urljoin(f"http://h{before}/blockyard/{path}", found) == f"http://h{before}{target}"


@pytest.mark.parametrize("path", ["index.html", "api/state", "dom.js", "details.js", "x/d/y"])
def test_what_is_no_frame_leads_nowhere_else(path: str) -> None:
    assert frame_target(path, {}) is None


def test_the_tab_is_left_alone_unless_asked_for_and_where_there_is_a_grafana_or_a_prometheus() -> None:
    assert tab_environment(ARGUMENTS, {}) == {}
    with pytest.raises(ValueError, match=GRAFANA_VARIABLE):
        tab_environment(ARGUMENTS, {**ASKED, GRAFANA_VARIABLE: "http://grafana:3000"})
    told = tab_environment(ARGUMENTS, {**ASKED, PROMETHEUS_VARIABLE: "http://prometheus:9090"})
    assert told[PROMETHEUS_VARIABLE] == "http://prometheus:9090"


@pytest.mark.parametrize(
    ("host", "asked"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("10.1.1.1", "10.1.1.1"), ("::1", "[::1]")],
)
def test_ray_asks_its_own_dashboard_how_it_is(host: str, asked: str) -> None:
    told = tab_environment([f"--host={host}", "--port=8299"], ASKED)
    assert told[GRAFANA_VARIABLE] == f"http://{asked}:8299{STAND_IN_PATH}/grafana"
    assert told[PROMETHEUS_VARIABLE] == f"http://{asked}:8299{STAND_IN_PATH}/prometheus"


@pytest.mark.parametrize(
    ("environment", "address", "told"),
    [
        ({}, None, None),
        ({GRAFANA_VARIABLE: "http://grafana:3000"}, None, "http://grafana:3000"),
        ({HOOK_VARIABLE: "builtins.print"}, None, HOOK_VARIABLE),
        ({}, "127.0.0.1:1", "--address"),
    ],
)
def test_up_refuses_the_option_where_it_would_do_nothing(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], address: str | None, told: str | None
) -> None:
    for name in (GRAFANA_VARIABLE, HOOK_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    engine = EngineConfig(model="demo", device="cpu")
    options = UpOptions(engine=engine, address=address, live_page_in_metrics_tab=True)
    found = dict(problems(options)).get("metrics tab")
    assert found is None if told is None else told in str(found)
