"""Modules that start and keep a cluster import no compute library, because each start would pay for it twice.

The base packages are enough for a client.
"""

import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from blockyard.deploy.machine import state
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .rig import python

ROOT = Path(__file__).parents[3]
COMPUTE = {"torch", "transformers", "llguidance"}
RUN = "from blockyard.deploy.cli import main\n"
DASHBOARD = "blockyard.deploy.dashboard"


@pytest.mark.parametrize(
    ("code", "kept_out"),
    [
        (
            "import blockyard.router.server, blockyard.router.actor, blockyard.router.tokenizing.process",
            COMPUTE,
        ),
        (f"import blockyard.deploy.supervision.supervisor\n{RUN}main.commands['up']", COMPUTE),
        (f"{RUN}main(['workers', '--cluster', 'x'])", {"redis", "blockyard.deploy.commands.lifecycle"}),
        ("import blockyard.deploy.figures.figures, blockyard.deploy.figures.plots", {"torch", "matplotlib"}),
        (f"import {DASHBOARD}.start_hook", {"ray", "grpc", "aiohttp"}),
        (f"import {DASHBOARD}.head_module", {"torch", "redis", "transformers"}),
    ],
)
def test_what_starts_often_loads_no_large_library(code: str, kept_out: set[str], home: Path) -> None:
    told = python(f"import atexit, sys\natexit.register(lambda: print(*sys.modules))\n{code}")
    assert (told.stdout != "", kept_out & {*told.stdout.split()}) == (True, set()), told.stderr


def test_what_rays_dashboard_loads_of_us_is_next_to_nothing() -> None:
    told = python(f"import sys, {DASHBOARD}.start_hook, {DASHBOARD}.head_module\nprint(*sys.modules)")
    ours = {name for name in told.stdout.split() if name.startswith("blockyard.")}
    modules = {"head_module", "metrics_tab", "start_hook"}
    assert ours == {"blockyard.deploy", DASHBOARD, *(f"{DASHBOARD}.{name}" for name in modules)}


def absent_extras() -> str:
    """Return code that blocks the imports of all extras, as after `pip install blockyard` without [serve]."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {Requirement(text).name for texts in project["optional-dependencies"].values() for text in texts}
    return f"""
import sys
from importlib import metadata
names = {sorted(map(canonicalize_name, extras))}
blocked = {{module for module, owners in metadata.packages_distributions().items()
           if any(owner.lower().replace("_", "-") in names for owner in owners)}} - {{"google"}}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
{RUN}"""


def test_a_client_and_the_commands_that_call_a_cluster_need_the_base_packages_alone() -> None:
    served = "print(*(name for name, command in main.commands.items() if '.[serve]' in command.help))"
    told = python(
        f"{absent_extras()}import blockyard.router.client\n{served}\nmain(['up', '--model', 'demo'])"
    )
    assert told.stdout.split() == [
        *("serve", "up", "down", "restart", "model", "size", "figures", "doctor", "config", "export")
    ]
    assert told.returncode == 1
    assert told.stderr == (
        "Error: `blockyard up` needs the packages of a server: pip install '.[serve]' in a clone\n"
    )


@contextmanager
def listener() -> Iterator[str]:
    """A gRPC server without services, as much of Ray as a command sees before it imports it. Yields its address."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("command", [["status"], ["scale", "2"]])
def test_without_ray_a_command_that_asks_it_says_what_to_install(command: list[str], home: Path) -> None:
    with listener() as address:
        supervised = {"routers": ("127.0.0.1:1",), "is_supervised": True, "ray_address": address}
        state.save(state.ClusterState(cluster="default", model="m", secret="s", **supervised))
        told = python(f"{absent_extras()}main({command})\n")
    assert told.returncode == 1
    assert told.stderr == "Error: this needs the packages of a server: pip install '.[serve]' in a clone\n"
    assert ("no router answers" in told.stdout) == (command == ["status"]), "what can be known is said first"
