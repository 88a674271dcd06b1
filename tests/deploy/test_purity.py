"""What starts and keeps a cluster computes nothing, and loads nothing that does: each start pays for it twice."""

import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


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


def test_a_client_and_the_commands_that_call_a_cluster_need_the_base_packages_alone() -> None:
    """Blocks all other imports, as after `pip install blockyard` without [serve]."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {Requirement(text).name for texts in project["optional-dependencies"].values() for text in texts}
    code = (
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
        "import blockyard.router.client\n"
        "from blockyard.deploy.cli import main\n"
        "print(*(name for name, command in main.commands.items() if '.[serve]' in command.help))\n"
        "main(['up', '--model', 'demo'])\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert told.stdout.split() == ["serve", "up", "down", "restart", "size", "figures", "doctor", "config"]
    assert told.returncode == 1
    assert told.stderr == (
        "Error: `blockyard up` needs the packages of a server: pip install '.[serve]' in a clone\n"
    )
