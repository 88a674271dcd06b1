"""A real Prometheus that scrapes a cluster or a process, with the scrape configuration that we ship."""

import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.system.harness import eventually

from .promtool import GRAFANA

START_SECONDS = 60.0
CALL_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus:
    address: str

    def ask(self, path: str, **parameters: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=CALL_SECONDS) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from None

    def vector(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Raises AssertionError, with Prometheus' own words, for an expression that does not parse."""
        result = self.ask("query", query=expression)["result"]
        return [(series["metric"], float(series["value"][1])) for series in result]

    def number(self, expression: str) -> float:
        """Return the value of one series; 0 if there is none."""
        found = self.vector(expression)
        assert len(found) <= 1, found
        return found[0][1] if found else 0.0


@contextmanager
def prometheus(
    folder: Path, *, ray: Sequence[str] = (), plain: Sequence[str] = (), address: str | None = None
) -> Iterator[Prometheus]:
    """Scrapes these targets each second, with our rules; ends with the context."""
    shutil.copy(GRAFANA / "alerts.yaml", folder)
    shipped = (GRAFANA / "prometheus.yaml").read_text(encoding="utf-8")
    quick = re.sub(r"(scrape|evaluation)_interval: \S+", r"\1_interval: 1s", shipped)
    (folder / "prometheus.yaml").write_text(quick, encoding="utf-8")
    for name, targets in (("ray-targets.json", ray), ("targets.json", plain)):
        (folder / name).write_text(json.dumps([{"targets": list(targets)}]), encoding="utf-8")
    address = address or free_address()
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            assert eventually(lambda: _is_ready(address), seconds=START_SECONDS), (folder / "log").read_text()
            yield Prometheus(address=address)
        finally:
            process.terminate()


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=CALL_SECONDS) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
