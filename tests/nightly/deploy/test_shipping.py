"""The code as a wheel, and the names that tell its copies apart."""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from blockyard.deploy.ray.shipping import build_wheel
from blockyard.proto.naming.code_version import code_version, package_folders

from .rig import python

SAY_VERSION = (
    "from blockyard.proto.naming import code_version as c; print(c.__file__); print(c.code_version())"
)


def run_python(code: str, *path: Path) -> list[str]:
    return python(code, env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}).stdout.split()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as pip installs it, on a node that has our dependencies: it names none to be fetched."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = build_wheel(folder)
    target = folder / "installed"
    # No index is named that could be reached: whoever asks for one fails.
    install = ("-m", "pip", "install", "--no-index", "--quiet", f"--target={target}", str(wheel))
    subprocess.run([sys.executable, *install], check=True, timeout=120)
    return target


def test_a_shipped_copy_is_whole_and_the_same_code_says_so_and_can_be_packed_again(
    installed: Path, tmp_path: Path
) -> None:
    where, version = run_python(SAY_VERSION, installed)
    assert Path(where).is_relative_to(installed)
    assert version == code_version()
    for package, folder in package_folders().items():
        ours = {path.relative_to(folder) for path in folder.rglob("*.py")}
        theirs = installed / "blockyard" / package
        assert ours == {path.relative_to(theirs) for path in theirs.rglob("*.py")}
    assert (installed / "blockyard/deploy/demo_model/checkpoint/model.safetensors").exists()
    assert not list(installed.rglob("*.pid")) + list(installed.rglob(".git*"))
    build = f"print(build_wheel(pathlib.Path({str(tmp_path)!r})).name)"
    (name,) = run_python(
        f"import pathlib; from blockyard.deploy.ray.shipping import build_wheel; {build}", installed
    )
    assert name == f"blockyard-{code_version()}-py3-none-any.whl"


def test_every_file_of_the_wheel_is_recorded_with_its_hash(tmp_path: Path) -> None:
    with zipfile.ZipFile(build_wheel(tmp_path)) as wheel:
        (record,) = (name for name in wheel.namelist() if name.endswith("/RECORD"))
        lines = [line.rsplit(",", 2) for line in wheel.read(record).decode().splitlines()]
        assert {name for name, _, _ in lines} == set(wheel.namelist())
        for name, digest, size in lines:
            if name == record:
                continue
            content = wheel.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            assert (digest, int(size)) == (f"sha256={expected}", len(content))


@pytest.mark.parametrize(
    ("source", "line"),
    [("worker/sampling/sampler.py", "# changed\n"), ("proto/index/lua/apply.lua", "-- changed\n")],
)
def test_one_changed_line_is_another_version(installed: Path, tmp_path: Path, source: str, line: str) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(installed, changed)
    with (changed / "blockyard" / source).open("a") as file:
        file.write(line)
    _, version = run_python(SAY_VERSION, changed)
    assert version != code_version()
    assert version.partition("+")[0] == code_version().partition("+")[0]
