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
from blockyard.deploy.supervision.replicas import OtherCodeError, Replica, check_code
from blockyard.proto.naming.code_version import code_version, package_folders

SAY_VERSION = (
    "from blockyard.proto.naming import code_version as c; print(c.__file__); print(c.code_version())"
)


def run_python(code: str, *path: Path) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return told.stdout.split()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as pip installs it, on a node that has our dependencies: it names none to be fetched."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = build_wheel(folder)
    target = folder / "installed"
    # No index is named that could be reached: whoever asks for one fails.
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-index",
        "--quiet",
        f"--target={target}",
        str(wheel),
    ]
    subprocess.run(install, check=True, timeout=120)
    return target


def test_a_shipped_copy_is_the_same_code_and_says_so(installed: Path) -> None:
    where, version = run_python(SAY_VERSION, installed)
    assert Path(where).is_relative_to(installed)
    assert version == code_version()


def test_a_shipped_copy_can_be_packed_again(installed: Path, tmp_path: Path) -> None:
    build = "from blockyard.deploy.ray.shipping import build_wheel; print(build_wheel(pathlib.Path(%r)).name)"
    (name,) = run_python(f"import pathlib; {build}" % str(tmp_path), installed)
    assert name == f"blockyard-{code_version()}-py3-none-any.whl"


def test_a_shipped_copy_has_all_that_the_package_needs(installed: Path) -> None:
    for package, folder in package_folders().items():
        ours = {path.relative_to(folder) for path in folder.rglob("*.py")}
        theirs = installed / "blockyard" / package
        assert ours == {path.relative_to(theirs) for path in theirs.rglob("*.py")}
    assert (installed / "blockyard/deploy/demo_model/checkpoint/model.safetensors").exists()
    assert not list(installed.rglob("*.pid")) + list(installed.rglob(".git*"))


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


def test_a_place_on_a_node_with_other_code_is_refused_with_both_versions() -> None:
    replica = Replica(name="worker-1", kind="worker", code="0.1.0+aaaa")
    check_code(replica, "0.1.0+aaaa")
    check_code(replica, "")
    with pytest.raises(OtherCodeError, match=r"0\.1\.0\+aaaa, the cluster runs 0\.1\.0\+bbbb.*--ship-code"):
        check_code(replica, "0.1.0+bbbb")
