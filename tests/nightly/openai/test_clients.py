"""Real clients of OpenAI's API, in an environment of their own (`make test-clients`), against a router and worker."""

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.openai.rig import MODEL

from .agent_model import write_agent_model
from .ai_sdk_bodies import BODIES, TEXTS, THOUGHTS, named
from .clients import SCORED
from .rig import served

PYTHON = os.environ.get("BLOCKYARD_CLIENTS", "")
"""The interpreter of that environment."""
PROGRAM = Path(__file__).parent / "clients.py"
AI_SDK = Path(__file__).parent / "ai_sdk.mjs"

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="`make test-clients` installs the clients and sets BLOCKYARD_CLIENTS"
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("clients"), with_redis=True) as found:
        yield f"{found}/v1"


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


@pytest.mark.parametrize("client", ["litellm", "langchain", "guidellm", "agents"])
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


@pytest.fixture(scope="module")
def agent_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a model that reasons, calls a tool and answers with its result."""
    folder = tmp_path_factory.mktemp("agent")
    model = folder / "model"
    write_agent_model(model)
    options = ("--device", "cpu", "--deterministic", "--kv-cache-memory", str(256 * 2**20))
    with served(folder, worker=options, with_redis=True, model=model) as found:
        yield f"{found}/v1"


@pytest.mark.parametrize("mode", BODIES)
def test_the_ai_sdk_holds_five_turns_with_tools_and_the_model_sees_its_reasoning(
    mode: str, agent_url: str
) -> None:
    """Its bodies are those with which test_returned_items.py tries the same in every run."""
    options, kept = BODIES[mode]
    packages = Path(PYTHON).parent.parent / "node"
    shutil.copy(AI_SDK, packages)
    result = subprocess.run(
        ["node", AI_SDK.name, agent_url, json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=packages,
    )
    assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    told: dict[str, Any] = json.loads(result.stdout)
    called, answered = (
        {"text": text, "reasoningText": thought if "reasoningSummary" in options else "", "calls": calls}
        for text, thought, calls in zip(TEXTS, THOUGHTS, (1, 0), strict=True)
    )
    assert told["turns"] == [[called, answered]] * 5
    bodies = [exchange["body"] for exchange in told["exchanges"]]
    responses = [exchange["response"] for exchange in told["exchanges"]]
    named_last = named(bodies[-1], [response["output"] for response in responses])
    assert named_last == kept
    for body, later in itertools.pairwise(bodies):
        assert later["input"][: len(body["input"])] == body["input"]
    for before, response in itertools.pairwise(responses):
        # The prompt repeats the answer to the token: all its blocks are reused.
        written = before["usage"]["total_tokens"] - 1
        assert response["usage"]["input_tokens_details"]["cached_tokens"] >= written - written % 16
