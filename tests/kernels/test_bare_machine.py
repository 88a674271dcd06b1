"""What `make gpu-check` and `make gpu-bench` need can be imported where only torch, triton, numpy, pytest, safetensors
and transformers are."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ABSENT = ("hypothesis", "grpc", "ray", "redis", "llguidance", "pytest_asyncio", "pytest_timeout", "xdist")
COLLECT = f"""
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {ABSENT!r} else find_spec(name, package)
import pytest
raise SystemExit(pytest.main(["--collect-only", "-q", *sys.argv[1:]]))
"""
GPU_CHECK = re.search(
    r"^gpu-check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
)


def test_gpu_check_collects_its_tests_there() -> None:
    assert GPU_CHECK is not None
    wanted = re.findall(r"tests/[\w./]+", GPU_CHECK[1])
    assert "tests/kernels" in wanted
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, *wanted],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == pytest.ExitCode.OK, done.stdout[-3000:] + done.stderr[-1000:]
    for path in wanted:
        assert path in done.stdout
