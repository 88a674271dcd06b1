"""The commands and programs of the documents and every program in examples/ run against a real cluster.

Commands run block by block, in a shell and in an otherwise empty folder. Those that need Ray, another machine or a
user's files do not run (`RUN` lists which). tests/nightly/cluster runs the README's own. The commands call the cluster
of these tests: a URL with port 8000 becomes that of its gateway.
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

from tests.unit.docs.rig import ROOT, Block, blocks

RUN = re.compile(
    r"openssl |chmod |blockyard (config|size|figures|token|bench|generate|blocks|workers|index|explain|doctor)\b"
    r"|blockyard up .*--dry-run"
)
SOMEBODYS = re.compile(r"HEAD|FOLDER|~/|\brouter\.example\b")
GATEWAY = "http://127.0.0.1:8000"
"""The documents' OpenAI server."""
RUN_SECONDS = 800.0
"""Ten times what the longest takes on a quiet machine."""
SETTINGS = re.compile(r"^```toml\n# cluster\.toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def script(block: Block) -> str:
    """Return its lines that can run here, as a user types them with `blockyard` on the PATH."""
    lines = block.text.replace("\\\n", " ").replace(".venv/bin/", "").splitlines()
    return "\n".join(line for line in lines if RUN.match(line) and not SOMEBODYS.search(line))


RUNNABLE = [block for kind in ("bash", "sh") for block in blocks(kind) if script(block)]


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


@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", RUNNABLE, ids=str)
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


@pytest.mark.parametrize("block", [block for block in blocks("python") if block.is_run], ids=str)
def test_a_program_of_a_document_runs(block: Block, router: str) -> None:
    program = (block.imports + block.text).replace("127.0.0.1:50051", router)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=EXAMPLE_SECONDS, cwd=ROOT
    )
    assert result.returncode == 0, f"{block}\n{result.stderr}"


def test_most_documents_with_commands_have_one_that_is_run() -> None:
    assert {str(block.document) for block in RUNNABLE} >= {
        "README.md",
        "SECURITY.md",
        "docs/cli.md",
        "docs/deploying.md",
        "docs/get-started.md",
        "docs/tuning.md",
    }


EXAMPLES = ROOT / "examples"
EXAMPLE_SECONDS = 120.0
SAYS = {
    "streaming_chat.py": r"tokens from worker-\d, because of \w+\n\d+ of \d+ prompt tokens were cached\n",
    "many_requests.py": r"worker-\d answered \d+ of 24\n",
    "json_answer.py": r" has \d+ lines, test: (True|False)\n",
    "chat_session.py": r"\[worker-\d: [1-9]\d* of \d+ prompt tokens cached\]\n$",
    "errors_and_timeouts.py": (
        r"sampling.top_p must be above 0 and at most 1\n.*MODEL_NOT_FOUND\n.*took too long.*\n.*an answer\n"
        r".*no router answers at 127.0.0.1:1: connection refused\n"
    ),
    "administer.py": (
        r"drained worker-0: 0 requests moved to other workers\nmeanwhile worker-1 answers\nworker-0 takes requests"
    ),
}


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=EXAMPLE_SECONDS)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("name", SAYS)
def test_the_example_runs_and_says_what_it_promises(name: str, router: str) -> None:
    assert re.search(SAYS[name], run(name, router)), name


def test_a_batch_is_answered_in_the_files_order_and_says_which_row_failed(
    tmp_path: Path, router: str
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": f"def f{number}(", "id": number} for number in range(20)] + [{"prompt": "", "id": 20}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    without_arguments = subprocess.run(
        [sys.executable, str(EXAMPLES / "batch_file.py")],
        capture_output=True,
        text=True,
        timeout=EXAMPLE_SECONDS,
    )
    assert (without_arguments.returncode, without_arguments.stderr[:6]) == (1, "usage:")
    assert run("batch_file.py", str(source), str(target), router) == "21 prompts, 1 failed\n"
    answered = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [row["id"] for row in answered] == list(range(21))
    assert all(row["tokens"] > 0 for row in answered[:20])
    assert answered[20]["error"] == "INVALID_REQUEST"


def test_the_engine_alone_finds_on_its_second_round_what_the_first_has_left() -> None:
    said = run("embedded_engine.py")
    first, second = (int(number) for number in re.findall(r"^round \d: (\d+) of", said, flags=re.MULTILINE))
    assert second > first


def test_every_example_is_tested_here_listed_in_their_readme_and_short() -> None:
    programs = {path.name for path in EXAMPLES.glob("*.py")}
    assert programs == {*SAYS, "batch_file.py", "embedded_engine.py"}
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"]({name})" in listed for name in programs)
    assert all(len((EXAMPLES / name).read_text().splitlines()) < 60 for name in programs)
