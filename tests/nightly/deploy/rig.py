"""Programs in processes of their own."""

import subprocess
import sys
from typing import Any


def python(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program and return what it said and how it ended."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, **options
    )


def blockyard(*arguments: str, **options: Any) -> "subprocess.Popen[str]":
    """Start a command, whose output can be read."""
    command = [sys.executable, "-m", "blockyard.deploy.cli", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
