"""What starts and keeps a cluster computes nothing, and loads nothing that does: each start pays for it twice."""

import subprocess
import sys


def test_a_router_and_its_tokeniser_process_load_no_torch() -> None:
    code = (
        "import sys\n"
        "import blockyard.router.server, blockyard.router.actor, blockyard.router.tokenizer_process\n"
        "print(sorted({'torch', 'transformers', 'llguidance'} & sys.modules.keys()))\n"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_up_and_the_supervisor_load_no_torch_and_no_tokenizer() -> None:
    code = (
        "import sys\n"
        "import blockyard.deploy.cli, blockyard.deploy.supervisor\n"
        "print(sorted({'torch', 'transformers', 'llguidance'} & sys.modules.keys()))\n"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
