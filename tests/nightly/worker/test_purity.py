"""Imports show that decisions are pure, and that the engine does not depend on the server around it."""

import subprocess
import sys

RECORD = """
import torch
from blockyard.kernels.cpu.recording import Allocations, Arena
with Allocations(Arena()):
    torch.empty(3)
"""


def loaded_by(modules: str, names: set[str], then: str = "") -> str:
    code = f"import sys\nimport {modules}\n{then}\nprint(sorted({names!r} & sys.modules.keys()))\n"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_scheduler_and_all_it_decides_by_load_no_tensors_and_no_services() -> None:
    names = {"grpc", "torch", "ray", "redis", "asyncio", "llguidance"}
    assert loaded_by("blockyard.worker.scheduling.scheduler", names) == "[]"


def test_the_engine_runs_where_only_torch_is_and_records_its_steps_without_torchs_compiler() -> None:
    names = {"grpc", "ray", "redis", "llguidance", "torch._dynamo"}
    assert loaded_by("blockyard.worker.engine_thread, blockyard.worker.llm", names, RECORD) == "[]"
