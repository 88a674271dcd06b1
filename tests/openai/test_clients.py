"""Real clients of OpenAI's API, in an environment of their own (`make test-clients`), against a router and worker."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..faults.processes import DETERMINISTIC, processes  # noqa: TID252
from .clients import SCORED
from .rig import MODEL

PYTHON = os.environ.get("BLOCKYARD_CLIENTS", "")
"""The interpreter of that environment."""
PROGRAM = Path(__file__).parent / "clients.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON, reason="`make test-clients` installs the clients and sets BLOCKYARD_CLIENTS"
    ),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with processes(tmp_path_factory.mktemp("clients"), with_redis=True) as running:
        worker = running.add_worker("w0", *DETERMINISTIC)
        router = running.add_router("r0", "--http-port", "0", workers=[worker.address])
        running.start(worker, router)
        found = re.search(r"http://\S+/v1", router.log_text())
        assert found
        yield found[0]


def said(client: str, url: str, folder: Path) -> str:
    result = subprocess.run(
        [PYTHON, str(PROGRAM), client, url, str(MODEL)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result.stdout


@pytest.mark.parametrize("client", ["litellm", "langchain", "guidellm", "agents", "responses"])
def test_a_client_does_what_it_does_elsewhere(client: str, url: str, tmp_path: Path) -> None:
    said(client, url, tmp_path)


def test_lm_eval_gets_the_models_own_log_likelihoods(url: str, tmp_path: Path) -> None:
    """lm-eval asks by echo and logprobs, with a batch of token prompts and with text prompts."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    expected = []
    for context, continuation in SCORED:
        ids = tokenizer(context + continuation, return_tensors="pt").input_ids
        start = tokenizer(context, return_tensors="pt").input_ids.shape[1]
        with torch.inference_mode():
            logprobs_TV = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
        wanted = ids[0, start:]
        likelihood = float(logprobs_TV.gather(1, wanted[:, None]).sum())
        expected.append((pytest.approx(likelihood, abs=1e-3), bool((logprobs_TV.argmax(-1) == wanted).all())))
    runs = [json.loads(line) for line in said("lm_eval", url, tmp_path).splitlines() if line.startswith("[[")]
    assert len(runs) == 2
    for scores in runs:
        assert [tuple(score) for score in scores] == expected
