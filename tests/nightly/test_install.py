"""An installation with short output: never silent for long, and with the full output if it fails."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from uv import find_uv_bin

from tools import quiet_run

ROOT = Path(__file__).parents[2]
NO_INDEX = "http://127.0.0.1:9/simple"
TALKS = "import time\nfor n in range(40): print('Collecting package', n, flush=True); time.sleep(0.05)"


def test_a_long_command_is_told_of_in_a_few_lines_and_kept_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    began = time.monotonic()
    assert quiet_run.run(log, [sys.executable, "-c", TALKS], tell_seconds=0.5) == 0
    took = time.monotonic() - began
    told = capsys.readouterr().out.splitlines()
    while told[0].endswith(" s] ..."):  # the command has not begun to talk
        told.pop(0)
    assert 1 <= len(told) <= took / 0.5
    assert all(" s] Collecting package " in line for line in told)
    assert len(log.read_text().splitlines()) == 40


def test_a_command_that_fails_is_quoted_and_its_code_is_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = [sys.executable, "-c", "print('no room'); raise SystemExit(3)"]
    assert quiet_run.run(tmp_path / "log", fails) == 3
    told = capsys.readouterr().out
    assert "no room" in told
    assert "failed with 3" in told


def test_it_runs_with_nothing_installed(tmp_path: Path) -> None:
    script = [sys.executable, "-I", "-S", quiet_run.__file__, str(tmp_path / "log"), sys.executable, "-V"]
    quiet = subprocess.run(script, capture_output=True, text=True, timeout=30, check=False)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")


def test_while_pip_installs_it_is_not_told_what_pip_has_removed(tmp_path: Path) -> None:
    names = [f"package-{number}" for number in range(30)]
    said = f"""
      Downloading torch-2.13.0.whl (200.1 MB)
    Installing collected packages: {", ".join(names)}
      Attempting uninstall: setuptools
        Found existing installation: setuptools 66.1.1
        Uninstalling setuptools-66.1.1:
          Successfully uninstalled setuptools-66.1.1
    """
    (tmp_path / "log").write_text(said)
    told = quiet_run.what_it_does(tmp_path / "log", 7)
    assert told.startswith("Installing packages, 7 of 30 are there: package-0, package-1, ")
    assert told.endswith(" ...")
    shown = told.removesuffix(" ...").rstrip(",").partition(": ")[2].split(", ")
    assert shown == names[: len(shown)], "whole names"
    assert len(told) <= quiet_run.SHOWN_CHARS


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Downloading torch\n 10 MB\r 90 MB of 200 MB\r\n\n", "90 MB of 200 MB"),
        ("Downloading torch-2.13.0.whl (200.1 MB)", "Downloading torch-2.13.0.whl (200.1 MB)"),
        ("Collecting " + "a" * 50 + " " + "b" * 50, "Collecting " + "a" * 50 + " ..."),
        ("c" * 100 + " rest", "c" * 100 + " ..."),
    ],
)
def test_the_last_state_of_a_progress_bar_is_told_and_no_name_is_cut(
    tmp_path: Path, said: str, told: str
) -> None:
    (tmp_path / "log").write_text(said)
    assert quiet_run.what_it_does(tmp_path / "log") == told


def test_packages_that_came_since_the_start_are_counted(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for name, at in (("old", 100.0), ("new", 300.0), ("newer", 400.0)):
        (packages / f"{name}-1.dist-info").mkdir(parents=True)
        os.utime(packages / f"{name}-1.dist-info", (at, at))
    (packages / "new").mkdir()
    assert quiet_run.num_installed([str(tmp_path / "bin" / "pip"), "install"], 200.0) == 2
    assert quiet_run.num_installed(["pip"], 200.0) == 0


@pytest.mark.parametrize(
    ("choice", "source"),
    [("TORCH=cpu", "its own index for TORCH=cpu"), (f"TORCH_INDEX={NO_INDEX}", NO_INDEX)],
)
def test_make_install_says_what_to_do_where_pytorchs_index_is_out_of_reach(
    tmp_path: Path, choice: str, source: str
) -> None:
    """With the real uv, in a virtual environment of its own that has no pip: nothing is downloaded."""
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    binaries = tmp_path / ".venv/bin"
    (binaries / "pip").symlink_to("/bin/true")
    (binaries / "uv").symlink_to(find_uv_bin())
    offline = {"UV_HTTP_RETRIES": "0", "UV_CACHE_DIR": str(tmp_path / "cache")}
    offline |= {} if NO_INDEX in choice else {"UV_OFFLINE": "1"}
    done = subprocess.run(
        ["make", "install", choice], cwd=tmp_path, env=os.environ | offline, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert f"PyTorch was not installed from {source}: see the error of uv above" in done.stderr
    assert "TORCH_INDEX=URL" in done.stderr
    assert "'make install' without TORCH" in done.stderr
    assert not (binaries.parent / ".installed").exists()
    if NO_INDEX in choice:
        assert f"{NO_INDEX}/torch/" in done.stderr, "it was asked"
