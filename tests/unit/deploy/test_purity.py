"""Modules that start and keep a cluster import no compute library, because each start would pay for it twice."""

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from blockyard.deploy.machine import state
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]


@pytest.mark.ci
def test_a_router_and_its_tokeniser_process_load_no_torch() -> None:
    code = (
        "import sys\n"
        "import blockyard.router.server, blockyard.router.actor, blockyard.router.tokenizing.process\n"
        "print(sorted({'torch', 'transformers', 'llguidance'} & sys.modules.keys()))\n"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_up_and_the_supervisor_load_no_torch_and_no_tokenizer() -> None:
    code = (
        "import sys\n"
        "import blockyard.deploy.cli, blockyard.deploy.supervision.supervisor\n"
        "blockyard.deploy.cli.main.commands['up']\n"
        "print(sorted({'torch', 'transformers', 'llguidance'} & sys.modules.keys()))\n"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_a_command_loads_no_other_ones() -> None:
    code = (
        "import sys\n"
        "from blockyard.deploy.cli import main\n"
        "try:\n"
        "    main(['workers', '--cluster', 'nobodys'])\n"
        "finally:\n"
        "    print(*sorted({'redis', 'blockyard.deploy.commands.lifecycle'} & sys.modules.keys()))\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout.strip()) == (1, ""), told.stderr


def absent_extras() -> str:
    """Return code that blocks the imports of all extras, as after `pip install blockyard` without [serve]."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {Requirement(text).name for texts in project["optional-dependencies"].values() for text in texts}
    return (
        "import sys\n"
        "from importlib import metadata\n"
        f"names = {sorted(map(canonicalize_name, extras))}\n"
        "packages = metadata.packages_distributions()\n"
        "blocked = {module for module, owners in packages.items()\n"
        "           if any(owner.lower().replace('_', '-') in names for owner in owners)} - {'google'}\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in blocked:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )


def test_a_client_and_the_commands_that_call_a_cluster_need_the_base_packages_alone() -> None:
    code = (
        f"{absent_extras()}"
        "import blockyard.router.client\n"
        "from blockyard.deploy.cli import main\n"
        "print(*(name for name, command in main.commands.items() if '.[serve]' in command.help))\n"
        "main(['up', '--model', 'demo'])\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert told.stdout.split() == [
        "serve",
        "up",
        "down",
        "restart",
        "model",
        "size",
        "figures",
        "doctor",
        "config",
        "export",
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
def test_without_ray_a_command_that_asks_it_says_what_to_install(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(state.HOME_VARIABLE, str(tmp_path))
    code = f"{absent_extras()}from blockyard.deploy.cli import main\nmain({command})\n"
    with listener() as address:
        cluster = state.ClusterState(cluster="default", model="m", secret="s", ray_address=address)
        state.save(replace(cluster, routers=("127.0.0.1:1",), is_supervised=True))
        told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert told.returncode == 1
    assert told.stderr == "Error: this needs the packages of a server: pip install '.[serve]' in a clone\n"
    assert ("no router answers" in told.stdout) == (command == ["status"]), "what can be known is said first"
