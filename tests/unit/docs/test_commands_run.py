"""The commands in the documents run, block by block, in a shell and in an otherwise empty folder.

Commands that need Ray, another machine or a user's files do not run (`RUN` lists which). tests/nightly/cluster runs the
README's own. The commands call the cluster of these tests: a URL with port 8000 becomes that of its gateway. A long
block runs with the slow tests.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from blockyard.deploy.machine import state
from blockyard.deploy.settings.options import model_path

from .rig import ROOT
from .test_documents import Block, blocks

RUN = re.compile(
    r"openssl |chmod |blockyard (config|size|figures|token|bench|generate|blocks|workers|index|explain|doctor)\b"
    r"|blockyard up .*--dry-run"
)
SOMEBODYS = re.compile(r"HEAD|FOLDER|~/|\brouter\.example\b")
TAKES_LONG = re.compile("blockyard (bench|figures)")
GATEWAY = "http://127.0.0.1:8000"
"""The documents' OpenAI server."""
RUN_SECONDS = 800.0
"""Ten times what the longest takes on a quiet machine."""
LONG = [pytest.mark.slow, pytest.mark.timeout(900)]
SETTINGS = re.compile(r"^```toml\n# cluster\.toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def script(block: Block) -> str:
    """Return its lines that can run here, as a user types them with `blockyard` on the PATH."""
    lines = block.text.replace("\\\n", " ").replace(".venv/bin/", "").splitlines()
    return "\n".join(line for line in lines if RUN.match(line) and not SOMEBODYS.search(line))


RUNNABLE = [block for kind in ("bash", "sh") for block in blocks(kind) if script(block)]


def parameters() -> list[object]:
    return [
        pytest.param(block, id=str(block), marks=LONG if TAKES_LONG.search(script(block)) else [])
        for block in RUNNABLE
    ]


@pytest.fixture
def folder(tmp_path: Path, router: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the command on the PATH, a file of settings, and a trace."""
    command = tmp_path / "bin" / "blockyard"
    command.parent.mkdir()
    command.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m blockyard.deploy.cli "$@"\n', encoding="utf-8"
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=":")
    monkeypatch.setenv("BLOCKYARD_ROUTER", router)
    monkeypatch.setenv(state.HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.delenv("BLOCKYARD_REDIS_URL", raising=False)
    working = tmp_path / "work"
    working.mkdir()
    settings = SETTINGS.search((ROOT / "docs/cli.md").read_text(encoding="utf-8"))
    assert settings is not None
    written = settings[1].replace("127.0.0.1:50051", router).replace("router_port = 50051", "router_port = 0")
    (working / "cluster.toml").write_text(written)
    asked = {"timestamp": 0, "input_length": 600, "output_length": 8, "hash_ids": [0, 1]}
    (working / "FILE.jsonl").write_text("\n".join(json.dumps({**asked, "timestamp": t}) for t in (0, 200)))
    return working


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("block", parameters())
def test_a_block_of_commands_runs(block: Block, folder: Path, gateway: str) -> None:
    text = script(block).replace("/models/model", shlex.quote(model_path("demo")))
    text = text.replace(GATEWAY, f"http://{gateway}")
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    assert result.returncode == 0, f"{block}\n{text}\n{result.stdout}\n{result.stderr}"
    assert result.stdout.strip() or result.stderr.strip(), "it says something"


def test_most_documents_with_commands_have_one_that_is_run() -> None:
    assert {str(block.document) for block in RUNNABLE} >= {
        "README.md",
        "SECURITY.md",
        "docs/cli.md",
        "docs/deploying.md",
        "docs/get-started.md",
        "docs/tuning.md",
    }
