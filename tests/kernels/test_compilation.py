"""The Triton kernels compile for a GPU that may be absent: the interpreter accepts code that the compiler refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("arguments", "num_kernels"), [(["--quick"], 26), pytest.param([], 71, marks=pytest.mark.slow)]
)
def test_every_kernel_compiles_to_machine_code(
    tmp_path: Path, arguments: list[str], num_kernels: int
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_for_cuda.py")
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout)
    assert len(done.stdout.splitlines()) == num_kernels
