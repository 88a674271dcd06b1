"""Modules of `make gpu-check` and `make gpu-bench` import on a machine with few packages.

These are torch, triton, numpy, pytest, safetensors and transformers.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ABSENT = (
    "hypothesis",
    "aiohttp",
    "click",
    "cryptography",
    "google",
    "grpc",
    "prometheus_client",
    "ray",
    "redis",
    "llguidance",
    "pytest_asyncio",
    "pytest_timeout",
    "xdist",
    "rich",
    "matplotlib",
)
BLOCK = f"""
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {ABSENT!r} else find_spec(name, package)
"""
COLLECT = f"""
{BLOCK}
import pytest
raise SystemExit(pytest.main(["--collect-only", "-q", *sys.argv[1:]]))
"""
# Of the modules of gpu-bench's packages all but those that serve a whole cluster, which it does not start.
IMPORT = f"""
{BLOCK}
import importlib, pkgutil
for package in sys.argv[1:]:
    found = importlib.import_module(package)
    for module in pkgutil.iter_modules(found.__path__, package + "."):
        if module.name != "bench.engine.served_run":
            print(importlib.import_module(module.name).__name__)
sys.path.insert(0, "bench/engine/peers")
import transformers_run
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
"""
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
GPU_CHECK = re.findall(r"^GPU_CHECK_\w+ :=((?:.*\\\n)*.*)", MAKEFILE, re.MULTILINE)
GPU_BENCH = re.search(r"^GPU_PROOF(?s:.*?)(?=^install:)", MAKEFILE, re.MULTILINE)


def test_gpu_check_collects_its_tests_there() -> None:
    assert GPU_BENCH is not None
    wanted = re.findall(r"tests/[\w./]+", " ".join(GPU_CHECK))
    assert "tests/unit/kernels" in wanted
    for proof in re.findall(r"tests/[\w./]+", GPU_BENCH[0]):
        assert any(proof.startswith(f"{folder}/") for folder in wanted), proof
    done = bare(COLLECT, wanted)
    assert done.returncode == pytest.ExitCode.OK, done.stdout[-3000:] + done.stderr[-1000:]
    for path in wanted:
        assert path in done.stdout


def test_gpu_bench_imports_all_that_it_runs_there() -> None:
    assert GPU_BENCH is not None
    packages = sorted({*re.findall(r"GPU_BENCH\) (bench\.\w+)", GPU_BENCH[0])})
    assert packages == ["bench.engine", "bench.kernels", "bench.profile"]
    done = bare(IMPORT, packages)
    assert done.returncode == 0, done.stderr[-3000:]
    imported = done.stdout.split()
    assert {f"{package}.__main__" for package in packages} <= {*imported}
    assert {"bench.engine.ours_run", "bench.engine.plot"} <= {*imported}


def bare(script: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
