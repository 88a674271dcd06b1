"""Imports of the parts of the product: decisions are pure, clients are light, and tokenising needs no torch."""

import subprocess
import sys

import pytest

from tests.unit.router.rig import MODEL

NO_TRACES = """
import asyncio
from blockyard.router.calls.exporting import tracing_of
async def none():
    async with tracing_of('r', None) as tracing:
        assert tracing is None
asyncio.run(none())"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", *arguments], capture_output=True, text=True, check=True)


@pytest.mark.parametrize(
    ("program", "unwanted"),
    [
        (
            "import blockyard.router.admission.ledger, blockyard.router.cluster.view\n"
            "import blockyard.router.placement.policies",
            {"grpc", "torch", "ray", "redis", "asyncio"},
        ),
        ("import blockyard.router.client", {"torch", "ray", "transformers", "numpy", "redis"}),
        # The Redis client imports OpenTelemetry's metrics by itself.
        (
            f"import blockyard.router.server, blockyard.router.client{NO_TRACES}",
            {"opentelemetry.sdk.trace", "opentelemetry.exporter", "blockyard.router.calls.tracing"},
        ),
    ],
    ids=["decisions", "client", "traces"],
)
def test_what_is_not_needed_is_not_imported(program: str, unwanted: set[str]) -> None:
    assert (
        run(f"{program}\nimport sys\nprint(sorted({unwanted} & sys.modules.keys()))").stdout.strip() == "[]"
    )


def test_a_process_that_only_tokenises_loads_no_torch_says_nothing_of_it_and_may_load_it_later() -> None:
    code = (
        "import os, sys\n"
        "from blockyard.proto.text import load_tokenizer\n"
        "before = dict(os.environ)\n"
        "tokenizer = load_tokenizer(sys.argv[1])\n"
        "tokenizer.apply_chat_template([{'role': 'user', 'content': 'x'}], tokenize=False)\n"
        "print(len(tokenizer.encode('def f')) > 0, 'torch' in sys.modules, dict(os.environ) == before)\n"
        "import torch\n"
        "print(torch.ones(2).sum().item())\n"
    )
    done = run(code, str(MODEL))
    assert done.stdout.split() == ["True", "False", "True", "2.0"]
    assert done.stderr == ""
