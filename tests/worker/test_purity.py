"""Decisions are pure, and the engine needs none of what serves it: what they import says so."""

import subprocess
import sys


def loaded_by(modules: str, names: set[str]) -> str:
    code = f"import sys\nimport {modules}\nprint(sorted({names!r} & sys.modules.keys()))\n"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_scheduler_and_all_it_decides_by_load_no_tensors_and_no_services() -> None:
    names = {"grpc", "torch", "ray", "redis", "asyncio", "llguidance"}
    assert loaded_by("blockyard.worker.scheduler", names) == "[]"


def test_the_engine_runs_where_only_torch_is() -> None:
    names = {"grpc", "ray", "redis", "llguidance"}
    assert loaded_by("blockyard.worker.engine_thread, blockyard.worker.llm", names) == "[]"
