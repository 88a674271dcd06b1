"""Processes of their own: a CPU worker never imports Triton, and a backend's words follow PyTorch's settings."""

import os
import subprocess
import sys


def told(program: str, **environment: str) -> str:
    command, variables = [sys.executable, "-c", f"import torch; {program}"], os.environ | environment
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def test_a_cpu_worker_never_imports_triton() -> None:
    program = (
        "import sys; from blockyard.kernels.selection import choose_backend;"
        "choose_backend(torch.device('cpu')); choose_backend(torch.device('cpu'), deterministic=True);"
        "print('triton' in sys.modules)"
    )
    assert told(program) == "False\n"


def test_what_makes_pytorch_round_otherwise_changes_its_words() -> None:
    program = (
        "from blockyard.kernels.torch.backend import TorchBackend;"
        "print(*TorchBackend().arithmetic(torch.zeros(1, 2, 2, 16, 32), torch.float32))"
    )
    plain = told(program)
    for name, value in (
        ("ATEN_CPU_CAPABILITY", "default"),
        ("ONEDNN_MAX_CPU_ISA", "SSE41"),
        ("OMP_NUM_THREADS", "1"),
    ):
        assert told(program, **{name: value}) != plain, name
