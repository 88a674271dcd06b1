"""Makes requirements.lock, and proves that the pinned set installs from plain PyPI, without this machine's settings.

    python -m supply_chain.lock            # resolves again and writes requirements.lock
    python -m supply_chain.lock --check    # proves; writes nothing

The resolver is uv. It reads only metadata and downloads no wheel of torch or CUDA. If the registry cannot be reached,
the check says so and succeeds, since a build must not depend on it. `--must-reach` makes that an error.
"""

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT, CONSTRAINTS, LOCK = ROOT / "pyproject.toml", ROOT / "constraints.txt", ROOT / "requirements.lock"
PYTHONS = ("3.11", "3.12", "3.13")
LOCKED_PYTHON = PYTHONS[0]
OLDEST_RAY = "2.52.0"
"""Oldest version that pyproject.toml accepts. It must resolve with the rest of the lock."""
PRODUCT = ("serve", "otel", "plots")
"""Extras that are not for development."""
PLATFORM = "x86_64-manylinux_2_28"
RESOLVE_SECONDS = 120.0
HEAD = """\
# Every package with its version, by `make lock`: what plain PyPI gives for pyproject.toml and constraints.txt.
# torch chooses triton and the CUDA packages.
"""
DEVELOPMENT = "# For development alone."
UNREACHABLE = re.compile(
    r"failed to fetch|error sending request|dns error|operation timed out", re.IGNORECASE
)
"""Errors of uv about the network. Its errors about conflicts have package names, such as networkx."""


class UnreachableError(Exception):
    """The registry did not answer."""


class UnresolvableError(Exception):
    """No set of versions satisfies all requirements."""


def own_settings_off() -> dict[str, str]:
    """Return the environment without settings for indexes, constraints or caches of pip and uv."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    return kept | {"PIP_CONFIG_FILE": os.devnull}


def resolve(options: Sequence[str], constraints: Iterable[Path], *, with_dev: bool) -> list[str]:
    """Return lines `name==version` with their markers. Raises UnreachableError or UnresolvableError."""
    uv = Path(sysconfig.get_path("scripts")) / "uv"
    command = [str(uv), "pip", "compile", "--no-config", "--no-header", "--no-annotate", "--quiet"]
    command += [*options, str(PROJECT)]
    command += [word for extra in (*PRODUCT, *(["dev"] if with_dev else [])) for word in ("--extra", extra)]
    command += [word for path in constraints for word in ("--constraints", str(path))]
    try:
        result = subprocess.run(
            command,
            env=own_settings_off(),
            capture_output=True,
            text=True,
            timeout=RESOLVE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"no answer within {RESOLVE_SECONDS:.0f} s") from None
    if result.returncode == 0:
        return result.stdout.splitlines()
    if UNREACHABLE.search(result.stderr):
        raise UnreachableError(result.stderr.strip())
    raise UnresolvableError(result.stderr.strip())


def write() -> None:
    options = ("--universal", "--python-version", LOCKED_PYTHON)
    everything = resolve(options, [CONSTRAINTS], with_dev=True)
    together = LOCK.with_suffix(".new")
    together.write_text("\n".join(everything) + "\n", encoding="utf-8")
    try:
        product = resolve(options, [together], with_dev=False)
    finally:
        together.unlink()
    shipped = [line for line in everything if names([line]) <= names(product)]
    development = [line for line in everything if line not in shipped]
    LOCK.write_text("\n".join([HEAD, *shipped, "", DEVELOPMENT, *development, ""]), encoding="utf-8")
    print(f"{LOCK.name}: {len(shipped)} packages of the product, {len(development)} for development")


def check() -> None:
    """Raise UnresolvableError if a Python or the oldest Ray finds no set, or if the lock lacks a package."""
    for python in PYTHONS:
        found = resolve(_on_linux(python), [CONSTRAINTS], with_dev=True)
        print(f"Python {python}: constraints.txt resolves to {len(found)} packages")
    locked = resolve(_on_linux(LOCKED_PYTHON), [LOCK], with_dev=True)
    missing = names(locked) - names(LOCK.read_text(encoding="utf-8").splitlines())
    if missing:
        raise UnresolvableError(f"{LOCK.name} lacks {', '.join(sorted(missing))}: run `make lock`")
    print(f"Python {LOCKED_PYTHON}: {LOCK.name} resolves and is complete")
    with tempfile.TemporaryDirectory() as folder:
        older = Path(folder) / LOCK.name
        older.write_text(with_ray(LOCK.read_text(encoding="utf-8"), OLDEST_RAY), encoding="utf-8")
        resolve(_on_linux(LOCKED_PYTHON), [older], with_dev=True)
    print(f"Ray {OLDEST_RAY}: resolves with the rest of {LOCK.name}")


def with_ray(lock: str, version: str) -> str:
    """Return the lock with another version of Ray, as `make install RAY=...` makes it."""
    return re.sub(r"^ray==.*$", f"ray=={version}", lock, flags=re.MULTILINE)


def _on_linux(python: str) -> tuple[str, ...]:
    return ("--python-version", python, "--python-platform", PLATFORM)


def names(lines: Iterable[str]) -> set[str]:
    """Return the names of the packages. Comments and empty lines have none."""
    return {canonicalize_name(Requirement(line).name) for line in lines if line and line[0] != "#"}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m supply_chain.lock", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="prove what is pinned, write nothing")
    parser.add_argument("--must-reach", action="store_true", help="fail if the registry does not answer")
    arguments = parser.parse_args()
    try:
        check() if arguments.check else write()
    except UnreachableError as error:
        print(f"WARNING: the package registry cannot be reached, nothing is proven: {error}", file=sys.stderr)
        sys.exit(1 if arguments.must_reach or not arguments.check else 0)
    except UnresolvableError as error:
        sys.exit(f"the pinned packages do not install from plain PyPI:\n{error}")


if __name__ == "__main__":
    main()
