"""`blockyard doctor`: checks this machine, and the nodes of a Ray cluster, for problems that would prevent serving.

Owns the checks of this machine. Those of other nodes are in ray/nodes.py. Changes nothing.
"""

import importlib.metadata
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from blockyard.deploy.lifecycle import driver as on_ray
from blockyard.deploy.machine import state
from blockyard.deploy.machine.check_results import Finding, Verdict
from blockyard.deploy.machine.redis_server import (
    RedisStartError,
    configured_redis_url,
    find_redis_server,
    private_server_warning,
)
from blockyard.deploy.machine.redis_versions import OLDEST, version_of_program
from blockyard.deploy.ray import nodes
from blockyard.deploy.settings import redis_given
from blockyard.proto.index.shards import split_urls
from blockyard.worker.model.data_type import choose_dtype, cpu_has_bfloat16

PACKAGES = ("torch", "triton", "transformers", "ray", "grpcio", "protobuf", "redis", "numpy")
OPTIONAL_PACKAGES = frozenset({"triton"})
DASHBOARD_PORT = 8265
NEEDED_MEMORY_BYTES = 2 * 2**30
NEEDED_MEMORY_SHARE = 0.1
"""Share of the machine's memory that should be available. A Ray that we did not start kills workers at 95 % in use."""
NEEDED_DISK_BYTES = 2**30


def examine(model: str | None, redis_url: str | None) -> Iterator[Finding]:
    """Yield each finding about this machine as soon as it is made."""
    yield _python()
    yield from (_package(name) for name in PACKAGES)
    yield _backend()
    yield _data_type()
    yield _memory()
    yield _temporary_directory()
    yield _state_directory()
    yield _dashboard_port()
    given = redis_url or configured_redis_url()
    yield from [_private_redis()] if given is None else map(_redis, split_urls(given))
    if model is not None:
        yield from _model(model)


def examine_nodes(address: str, model: str | None, redis_url: str | None) -> Iterator[Finding]:
    """Yield findings about each node of a Ray cluster, compared with this machine.

    Raise RuntimeError if Ray or a node does not answer.
    """
    with on_ray.joined(address):
        asked = nodes.ask_nodes(PACKAGES, model, redis_url)
    here = {name: _version(name) for name in PACKAGES}
    yield from nodes.findings(asked, here, ".".join(map(str, sys.version_info[:3])))


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    verdict: Verdict = "ok" if sys.version_info >= (3, 11) and sys.platform.startswith("linux") else "fail"
    return Finding(
        verdict=verdict, subject="python", detail=f"{version} on {sys.platform} (needs 3.11 on Linux)"
    )


def _package(name: str) -> Finding:
    if (version := _version(name)) is not None:
        return Finding(verdict="ok", subject=name, detail=version)
    verdict: Verdict = "warn" if name in OPTIONAL_PACKAGES else "fail"
    return Finding(verdict=verdict, subject=name, detail="not installed")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backend() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding(verdict="fail", subject="backend", detail=f"torch does not import: {error}")
    if not torch.cuda.is_available():
        return _cpu_backend(torch.get_num_threads())
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return Finding(verdict="ok", subject="backend", detail=f"triton on {names}")


def _cpu_backend(num_threads: int) -> Finding:
    """Report the backend that kernels/interface.py would choose without a GPU. Do not build it."""
    from blockyard.kernels.cpu.extension import ExtensionUnavailable, prospect

    where = f"{num_threads} threads, no GPU here"
    try:
        detail = f"cpu ({where}): the C++ kernels, {prospect()}"
    except ExtensionUnavailable as error:
        detail = f"torch ({where}), slower than the C++ kernels would be: {error}"
        return Finding(verdict="warn", subject="backend", detail=detail)
    return Finding(verdict="ok", subject="backend", detail=detail)


def _data_type() -> Finding:
    """Report the data type in which a worker on this CPU computes a bfloat16 checkpoint."""
    chosen = choose_dtype("auto", "bfloat16", on_cpu=True, has_bfloat16=cpu_has_bfloat16())
    detail = f"--dtype auto computes a bfloat16 checkpoint on this CPU in {chosen}"
    return Finding(verdict="ok", subject="data type", detail=detail)


def _memory() -> Finding:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError as error:
        return Finding(verdict="warn", subject="memory", detail=f"cannot be read: {error.strerror}")
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return memory_finding(kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024)


def memory_finding(total_bytes: int, available_bytes: int) -> Finding:
    """Check the available memory, as an amount and as a share of the machine's memory."""
    detail = f"{available_bytes / 2**30:.1f} GiB available (Ray and two small workers take about 2)"
    if available_bytes < NEEDED_MEMORY_SHARE * total_bytes:
        share = f"{available_bytes / total_bytes:.0%} of {total_bytes / 2**30:.1f} GiB"
        detail += (
            f", {share}: when memory runs out, Ray or the kernel kills workers, whichever program uses it"
        )
        return Finding(verdict="warn", subject="memory", detail=detail)
    verdict: Verdict = "ok" if available_bytes >= NEEDED_MEMORY_BYTES else "warn"
    return Finding(verdict=verdict, subject="memory", detail=detail)


def _temporary_directory() -> Finding:
    directory = tempfile.gettempdir()
    if not os.access(directory, os.W_OK):
        return Finding(verdict="fail", subject="temp", detail=f"{directory} cannot be written")
    free_bytes = shutil.disk_usage(directory).free
    verdict: Verdict = "ok" if free_bytes >= NEEDED_DISK_BYTES else "warn"
    return Finding(verdict=verdict, subject="temp", detail=f"{directory}, {free_bytes / 2**30:.1f} GiB free")


def _state_directory() -> Finding:
    directory = state.home()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    verdict: Verdict = "ok" if os.access(existing, os.W_OK) else "fail"
    clusters = ", ".join(state.known_clusters()) or "none"
    return Finding(verdict=verdict, subject="state", detail=f"{directory}, clusters known: {clusters}")


def _dashboard_port() -> Finding:
    with socket.socket() as probe:
        taken = probe.connect_ex(("127.0.0.1", DASHBOARD_PORT)) == 0
    if taken:
        return Finding(
            verdict="warn",
            subject="dashboard",
            detail=f"port {DASHBOARD_PORT} is taken: it will use another",
        )
    return Finding(verdict="ok", subject="dashboard", detail=f"port {DASHBOARD_PORT} is free")


def _redis(url: str) -> Finding:
    looked = redis_given.look(url)
    if looked.problem:
        return Finding(verdict="fail", subject="redis", detail=f"the configured Redis: {looked.problem}")
    if (version := looked.version) is None:
        return Finding(verdict="warn", subject="redis", detail="it does not report its version")
    if version.version < OLDEST:
        return Finding(verdict="fail", subject="redis", detail=f"{version} (needs 6.2)")
    return Finding(
        verdict="warn" if version.warning else "ok", subject="redis", detail=version.warning or str(version)
    )


def _private_redis() -> Finding:
    try:
        found = find_redis_server()
    except RedisStartError as error:
        return Finding(verdict="fail", subject="redis-server", detail=str(error))
    version = version_of_program(found)
    if warning := private_server_warning(version):
        return Finding(verdict="warn", subject="redis-server", detail=f"{warning} (now: {found})")
    detail = f"private, {version or 'of unknown version'}, from {found}"
    return Finding(verdict="ok", subject="redis-server", detail=detail)


def _model(model: str) -> Iterator[Finding]:
    from blockyard.deploy.lifecycle.hub import hub_files, is_on_hub
    from blockyard.deploy.views.quantities import format_bytes
    from blockyard.worker.model.config import HUB_CONFIG_PATTERNS, load_config, resolve_model

    try:
        folder = resolve_model(model, patterns=HUB_CONFIG_PATTERNS)
        config = load_config(folder)
    except ValueError as error:
        yield Finding(verdict="fail", subject="model", detail=str(error))
        return
    context = config.max_position_embeddings
    yield Finding(verdict="ok", subject="model", detail=f"{config.architecture}, context {context:,}")
    if is_on_hub(model):
        files = hub_files(model)
        detail = (
            "the hub does not say how large it is"
            if files is None
            else (
                f"{files.num_files} files, {format_bytes(files.num_bytes)} on the hub, of which "
                f"{format_bytes(files.missing_bytes)} would be downloaded"
            )
        )
        yield Finding(verdict="warn" if files is None else "ok", subject="weights", detail=detail)
        return
    shards = sorted(folder.glob("*.safetensors"))
    yield _readable("weights", shards)
    yield _readable("tokenizer", [folder / "tokenizer.json"])


def _readable(subject: str, files: list[Path]) -> Finding:
    unreadable = [file.name for file in files if not os.access(file, os.R_OK)]
    if not files or unreadable:
        detail = f"cannot be read: {', '.join(unreadable)}" if unreadable else "there are none"
        return Finding(verdict="fail", subject=subject, detail=detail)
    total_bytes = sum(file.stat().st_size for file in files)
    return Finding(verdict="ok", subject=subject, detail=f"{len(files)} files, {total_bytes / 2**20:.1f} MiB")
