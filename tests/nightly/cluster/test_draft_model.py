"""A draft model on real Ray: tokens of one process without it, drafts that are accepted, and a refusal at the start."""

import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from blockyard.worker.llm import LLM, SamplingParams
from safetensors.torch import load_file, save_file

from tests.system.harness import Cluster, Command, eventually, running

from .rig import CHECKPOINT

ENGINE = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "64MiB", "--max-num-seqs", "16")
PROMPTS = ("def main():", "class Pool:\n    def __init__(self", "for block in")
NUM_TOKENS = 200
NUM_LAYERS = 36
VOCAB_SIZE = 4160
METRICS_SECONDS = 20.0


def up(model: Path, draft_model: Path) -> tuple[str, ...]:
    models = ("--model", str(model), "--draft-model", str(draft_model))
    return ("up", *models, *ENGINE, "--workers", "1", "--router-port", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the demo model's results, in six times as many layers and with a vocabulary that is padded."""
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path_factory.mktemp("deep") / "deep"))
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for layer in range(config["num_hidden_layers"], NUM_LAYERS):
        for name in [name for name in tensors if ".layers.0." in name]:
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            tensors[name.replace(".0.", f".{layer}.", 1)] = (
                torch.zeros_like(tensors[name]) if adds else tensors[name].clone()
            )
    embedding = tensors["model.embed_tokens.weight"]
    padding = embedding.new_zeros(VOCAB_SIZE - len(embedding), embedding.shape[1])
    tensors["model.embed_tokens.weight"] = torch.cat([embedding, padding])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    changed = {"num_hidden_layers": NUM_LAYERS, "vocab_size": VOCAB_SIZE}
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Cluster]:
    command = Command(home=tmp_path_factory.mktemp("home"), cluster="drafts")
    with running(command, *up(model, CHECKPOINT)) as cluster:
        yield cluster


def metric(cluster: Cluster, name: str) -> float:
    url = f"http://127.0.0.1:{cluster.state.metrics_port}/metrics"
    lines = urllib.request.urlopen(url, timeout=5).read().decode("utf-8").splitlines()
    found = [line for line in lines if line.startswith(f"ray_blockyard_{name}_total{{")]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_its_drafts_are_accepted_and_change_no_token(cluster: Cluster, model: Path) -> None:
    llm = LLM(str(model), device="cpu", dtype="float32", kv_cache_memory=64 * 2**20)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    expected = [
        list(answer.outputs[0].token_ids) for answer in llm.generate(PROMPTS, sampling, ignore_eos=True)
    ]
    with cluster.client() as client:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            deltas = client.stream(prompt, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
            assert [token for delta in deltas for token in delta.token_ids] == tokens
        (worker,) = client.list_workers()
        drafted, accepted = worker.load.drafted_tokens, worker.load.accepted_tokens
        assert drafted >= accepted > 0
        # The models have equal results. A few guesses follow earlier text instead.
        assert accepted > 0.5 * drafted
        assert eventually(
            lambda: metric(cluster, "accepted_tokens") == client.list_workers()[0].load.accepted_tokens,
            seconds=METRICS_SECONDS,
        )
