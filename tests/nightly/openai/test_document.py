"""docs/gateway.md is true: each example runs unchanged against the demo model, and each error is in its table.

The programs and curl calls of README.md and docs/get-started.md are tested too.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockyard.router import errors
from blockyard.router.openai.http.errors import HttpRefusal, status_of

from tests.system.processes import DETERMINISTIC, processes

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "gateway.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
PYTHON = [block for kind, block in BLOCKS if kind == "python" and "embeddings.create" not in block]
"""The one about embeddings needs another model (tests/nightly/cluster/test_embeddings.py)."""
CURL = next(block for kind, block in BLOCKS if kind == "bash" and block.startswith("curl"))
ADDRESS = "127.0.0.1:8000"
SAID = (
    *("cached prompt tokens: ", "0 length", "True", 'get_weather {"city"', "stored: False"),
    *(
        "temperature invalid_request",
        "completed 3\n['line-0', 'line-1', 'line-2']",
        "tool_use get_weather {'city'",
    ),
)
"""In what each program prints."""
NOT_OVER_HTTP = {
    errors.LastWorker,
    errors.PullFailed,
    errors.PullImpossible,
    errors.SlowReader,
    errors.NotFound,
    errors.UnknownRequest,
    errors.UnknownWorker,
    errors.Unavailable,
}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with processes(tmp_path_factory.mktemp("document")) as running:
        worker = running.add_worker("w0", *DETERMINISTIC)
        batches = str(tmp_path_factory.mktemp("batches"))
        options = ("--http-port", "0", "--batch-dir", batches)
        router = running.add_router("r0", *options, workers=[worker.address])
        running.start(worker, router)
        found = re.search(r"http://(\S+)/v1", router.log_text())
        assert found
        yield found[1]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("program", "said"),
    list(zip(PYTHON, SAID, strict=True)),
    ids=["stream", "n", "schema", "tools", "responses", "errors", "batch", "anthropic"],
)
def test_each_program_runs(address: str, program: str, said: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", program.replace(ADDRESS, address)], capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    if said == "True":
        assert result.stdout.strip() in ("True", "False")
    else:
        assert said in result.stdout


def test_each_call_of_curl_is_answered(address: str) -> None:
    lines = [
        "set -e",
        CURL.replace(ADDRESS, address).replace("curl -s", "curl --fail-with-body --max-time 60 -s"),
    ]
    result = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    for said in ('"object":"chat.completion"', "data: [DONE]", '"object":"list"', '"status":"serving"'):
        assert said in result.stdout


def test_the_readmes_program_prints_an_answer(address: str) -> None:
    (program,) = re.findall(
        r"^```python\n(from openai .*?)```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    result = subprocess.run(
        [sys.executable, "-c", program.replace(ADDRESS, address)], capture_output=True, text=True, timeout=100
    )
    assert (result.returncode, bool(result.stdout.strip())) == (0, True), result.stderr


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("README.md", ('"object":"chat.completion.chunk"', "data: [DONE]")),
        ("docs/get-started.md", ('"object":"text_completion"', '"cached_tokens":')),
    ],
)
def test_a_documents_curl_lines_are_answered(address: str, document: str, said: tuple[str, ...]) -> None:
    calls = re.findall(r"^curl .*?(?<!\\)\n", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)
    text = "".join(calls).replace(ADDRESS, address).replace("curl", "curl --fail-with-body --max-time 60")
    result = subprocess.run(
        ["bash", "-euc", text], capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for text_said in said:
        assert text_said in result.stdout


def test_every_error_is_in_the_table_under_its_status() -> None:
    rows = dict(re.findall(r"^\| ([\d, ]+) \| (.*?) \|", TEXT, re.MULTILINE))
    found = set()
    for kind in all_kinds(errors.RouterError):
        if "reason" not in vars(kind) or kind in NOT_OVER_HTTP:
            continue
        status = str(status_of(kind("x")))
        codes = next(codes for statuses, codes in rows.items() if status in statuses.split(", "))
        assert f"`{kind.reason.lower()}`" in codes, kind
        found.add(kind)
    assert HttpRefusal not in found
    assert len(found) > 20


def all_kinds(kind: type[errors.RouterError]) -> Iterator[type[errors.RouterError]]:
    for child in kind.__subclasses__():
        yield child
        yield from all_kinds(child)
