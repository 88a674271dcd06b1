"""The quick run has a part of every folder, and CI has every test that the quick run leaves out."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = sorted(
    path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("test_*.py"))
)
CORE = [
    "worker/test_block_pool.py",
    "worker/test_prefix_cache.py",
    "worker/test_scheduler_property.py",
    "router/test_placement_properties.py",
    "index/test_prefix_index_property.py",
    "simulation/test_simulation.py",
]
WHOLE_PATH = [
    "cluster/test_cluster.py",
    "cluster/test_adapters.py",
    "cluster/test_models.py",
    "deploy/test_commands.py",
    "deploy/test_top.py",
    "faults/test_worker_death.py",
    "security/test_session_tls.py",
]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_has_a_quick_test(folder: str, quick_files: frozenset[str]) -> None:
    assert any(path.startswith(f"{folder}/") for path in quick_files)


@pytest.mark.parametrize("path", [*CORE, *WHOLE_PATH])
def test_the_core_and_the_whole_path_are_quick(path: str, quick_files: frozenset[str]) -> None:
    assert path in quick_files


def test_ci_leaves_out_nothing_but_slow_tests() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "\nLANDING := not slow and not slow_fault\n" in makefile
    assert "\ntest-ci: install\n\t$(call run_tests,$(LANDING))\n" in makefile
    assert "make test-ci || make test-again" in (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(("num_flaky", "num_broken", "passes"), [(3, 0, True), (4, 0, False), (1, 1, False)])
def test_ci_tries_few_failed_tests_again(
    tmp_path: Path, num_flaky: int, num_broken: int, passes: bool
) -> None:
    (tmp_path / "test_some.py").write_text(
        f"""
import pytest
from pathlib import Path

@pytest.mark.parametrize("number", range({num_flaky}))
def test_flaky(number):
    seen = Path(str(number))
    if not seen.exists():
        seen.touch()
        pytest.fail()

@pytest.mark.parametrize("number", range({num_broken}))
def test_broken(number):
    pytest.fail()

def test_sound():
    pass
""",
        encoding="utf-8",
    )
    runs = [
        [sys.executable, "-m", "pytest", "-q"],
        ["make", "-f", str(ROOT / "Makefile"), "-o", "install", "test-again", f"BIN={Path(sys.executable).parent}"],
    ]  # fmt: skip
    first, again = [
        subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False) for run in runs
    ]
    assert f"{num_flaky + num_broken} failed, 1 passed" in first.stdout
    assert (again.returncode == 0) is passes, again.stdout + again.stderr
    assert ("test_sound" in again.stdout) is False, "what passed is not tried again"
