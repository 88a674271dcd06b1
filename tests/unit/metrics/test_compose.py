"""deploy/compose.yaml: the files that it mounts exist, and Prometheus' and Grafana's settings fit together.

No docker starts it here; Prometheus' own checker reads the configuration as it is mounted.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from blockyard.deploy.grafana import dashboard

from .promtool import GRAFANA, needs_prometheus, promtool

COMPOSE = GRAFANA.parent / "compose.yaml"
SPEC: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = SPEC["services"]


def mounts(service: str) -> dict[str, Path]:
    """Files and folders of ours, by where the container has them."""
    parts = (volume.split(":") for volume in SERVICES[service]["volumes"])
    return {there: COMPOSE.parent / here for here, there, *_ in parts if here.startswith("./")}


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


@needs_prometheus
def test_promtool_takes_the_configuration_as_it_is_mounted(tmp_path: Path) -> None:
    (option,) = (one for one in SERVICES["prometheus"]["command"] if one.startswith("--config.file="))
    inside = Path(option.partition("=")[2])
    folder = shutil.copytree(mounts("prometheus")[str(inside.parent)], tmp_path / "prometheus")
    checked = promtool("check", "config", str(folder / inside.name))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "rules found" in checked.stdout


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
