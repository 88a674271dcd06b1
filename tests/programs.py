"""Programs of the system that some tests need and no Python package provides.

A test that lacks one is skipped. It fails where BLOCKYARD_REQUIRE_PROGRAMS is set, as in CI, which installs them.
"""

import os
import shutil
from typing import NoReturn

import pytest

REQUIRE_VARIABLE = "BLOCKYARD_REQUIRE_PROGRAMS"


def are_required(variable: str = REQUIRE_VARIABLE) -> bool:
    return os.environ.get(variable, "") not in ("", "0")


def missing(*names: str) -> list[str]:
    return [name for name in names if shutil.which(name) is None]


def first_of(*names: str, why: str) -> str:
    """Return the path of the first program that exists here; otherwise skip or fail the running test."""
    for name in names:
        if (path := shutil.which(name)) is not None:
            return path
    unless_required(f"no {' or '.join(names)} on the PATH: {why}")


def unless_required(told: str, variable: str = REQUIRE_VARIABLE) -> NoReturn:
    """Skip the running test, or fail it where the variable is set."""
    if are_required(variable):
        pytest.fail(f"{told}; {variable} is set")
    pytest.skip(told)
