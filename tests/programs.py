"""Programs of the system that some tests need and no package of Python brings: where one is missing they are skipped,
or fail where BLOCKYARD_REQUIRE_PROGRAMS is set, as by CI that has installed them."""

import os
import shutil

import pytest

REQUIRE_VARIABLE = "BLOCKYARD_REQUIRE_PROGRAMS"


def are_required() -> bool:
    return os.environ.get(REQUIRE_VARIABLE, "") not in ("", "0")


def missing(*names: str) -> list[str]:
    return [name for name in names if shutil.which(name) is None]


def first_of(*names: str, why: str) -> str:
    """The path of the first that is here; else the running test ends."""
    for name in names:
        if (path := shutil.which(name)) is not None:
            return path
    told = f"no {' or '.join(names)} on the PATH: {why}"
    if are_required():
        pytest.fail(f"{told}; {REQUIRE_VARIABLE} is set")
    pytest.skip(told)
