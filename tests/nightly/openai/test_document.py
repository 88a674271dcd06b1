"""docs/gateway.md is true: each example runs unchanged against the demo model. So do the programs and curl calls of
README.md and docs/get-started.md."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BLOCKS = re.findall(
    r"^```(\w+)\n(.*?)^```$", (ROOT / "docs/gateway.md").read_text(), re.DOTALL | re.MULTILINE
)
PYTHON = [block for kind, block in BLOCKS if kind == "python" and "embeddings.create" not in block]
"""The one about embeddings needs another model (tests/nightly/cluster/test_embeddings.py)."""
PYTHON += re.findall(
    r"^```python\n(from openai .*?)```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
)
CURL = next(block for kind, block in BLOCKS if kind == "bash" and block.startswith("curl"))
ADDRESS = "http://127.0.0.1:8000"
SAID = {
    "stream": "cached prompt tokens: ",
    "n": "0 length",
    "schema": r"^(True|False)\n$",
    "tools": 'get_weather {"city"',
    "responses": "stored: False",
    "errors": "temperature invalid_request",
    "batch": r"completed 3\n\['line-0', 'line-1', 'line-2'\]",
    "anthropic": r"tool_use get_weather \{'city'",
    "readme": r"\S",
}
"""In what each program prints."""


@pytest.mark.parametrize(("program", "said"), list(zip(PYTHON, SAID.values(), strict=True)), ids=list(SAID))
def test_each_program_runs(url: str, program: str, said: str) -> None:
    command = [sys.executable, "-c", program.replace(ADDRESS, url)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert re.search(said, result.stdout), result.stdout


def curl_lines(document: str) -> str:
    return "".join(re.findall(r"^curl .*?(?<!\\)\n", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (CURL, ('"object":"chat.completion"', "data: [DONE]", '"object":"list"', '"status":"serving"')),
        (curl_lines("README.md"), ('"object":"chat.completion.chunk"', "data: [DONE]")),
        (curl_lines("docs/get-started.md"), ('"object":"text_completion"', '"cached_tokens":')),
    ],
    ids=["gateway", "readme", "get-started"],
)
def test_each_call_of_curl_is_answered(url: str, calls: str, said: tuple[str, ...]) -> None:
    text = calls.replace(ADDRESS, url).replace("127.0.0.1:8000", url)
    text = re.sub(r"\bcurl\b", "curl --fail-with-body --max-time 60", text)
    result = subprocess.run(
        ["bash", "-euc", text], capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for expected in said:
        assert expected in result.stdout
