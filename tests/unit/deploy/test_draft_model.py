"""A draft model before the start: `size` counts it, and `up` refuses one that cannot be used or does not fit."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from blockyard.deploy.cli import main
from blockyard.deploy.lifecycle import preflight
from blockyard.deploy.machine import state
from blockyard.deploy.settings import size
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.worker.config import EngineConfig
from click.testing import CliRunner, Result

from .test_dry_run import CHECKPOINT, failures, plan, shorten


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(state.HOME_VARIABLE, str(tmp_path / "home"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_size_counts_the_weights_and_the_pool_of_a_draft_model() -> None:
    asked = ("size", "demo", "--memory", "18MiB", "--device", "cpu", "--dtype", "float32")
    alone = json.loads(run(*asked, "--output", "json").stdout)
    beside = (*asked, "--draft-model", "demo", "--max-num-seqs", "16")
    both = json.loads(run(*beside, "--output", "json").stdout)
    assert (alone["draft_weights_bytes"], alone["draft_kv_bytes"]) == (0, 0)
    assert both["draft_weights_bytes"] == both["weights_bytes"] == alone["weights_bytes"]
    # The same model twice, and a spare block for each sequence.
    assert both["blocks"] == (alone["blocks"] - 16) // 2
    assert both["draft_kv_bytes"] == (both["blocks"] + 16) * both["bytes_per_block"]
    assert both["total_bytes"] - alone["total_bytes"] == alone["weights_bytes"]
    told = run(*beside).stdout
    assert re.search(r"^draft model +\d.* of weights *$", told, re.MULTILINE)
    assert re.search(r"^its KV cache +9\.4 MiB of the same memory *$", told, re.MULTILINE)
    several = json.loads(run(*beside, "--model", "demo", "--output", "json").stdout)
    assert [model["draft_weights_bytes"] > 0 for model in several["models"]] == [True, False]
    refused = run(*beside, "--tensor-parallel-size", "2")
    assert (refused.exit_code, "a worker of one rank" in refused.output) == (1, True)


def lose_a_shard(file: Path) -> None:
    index = {"weight_map": {"a": file.name, "b": "model-00002-of-00002.safetensors"}}
    (file.parent / "model.safetensors.index.json").write_text(json.dumps(index))


def change_tokens(file: Path) -> None:
    tokenizer = file.with_name("tokenizer.json")
    content = json.loads(tokenizer.read_text())
    vocab = content["model"]["vocab"]
    first, second, *_ = vocab
    vocab[first], vocab[second] = vocab[second], vocab[first]
    tokenizer.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (shorten, "--draft-model: "),
        (shorten, "is not a readable safetensors file"),
        (lose_a_shard, "names the shard 'model-00002-of-00002.safetensors', which is not beside it"),
        (change_tokens, "has another tokenizer than the served model"),
        (
            lambda file: file.with_name("config.json").unlink(),
            "small is no model folder: it has no config.json",
        ),
    ],
)
def test_a_draft_model_that_cannot_be_used_is_refused_before_anything_starts(
    spoil: Callable[[Path], object], why: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "small"))
    code, document = plan("--draft-model", str(folder))
    assert code == 0, failures(document)
    spoil(folder / "model.safetensors")
    code, document = plan("--draft-model", str(folder))
    assert code != 0
    assert why in failures(document)["model"]


def test_weights_and_pool_of_a_draft_model_must_fit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineConfig(
        model=str(CHECKPOINT), device="cpu", dtype="float32", kv_cache_memory=64 * 2**20, max_num_seqs=16
    )
    beside = replace(engine, draft_model=str(CHECKPOINT))
    needed_bytes = (
        size.size_model(
            str(CHECKPOINT),
            draft_model=str(CHECKPOINT),
            max_num_seqs=16,
            budget_bytes=64 * 2**20,
            block_size=engine.block_size,
            dtype="float32",
            kv_cache_dtype="auto",
            on_cpu=True,
            max_model_len=None,
        )
    ).total_bytes
    monkeypatch.setattr(preflight, "machine_memory_bytes", lambda: needed_bytes)
    preflight.check_model(UpOptions(engine=beside, num_workers=1))
    monkeypatch.setattr(preflight, "machine_memory_bytes", lambda: needed_bytes - 1)
    preflight.check_model(UpOptions(engine=engine, num_workers=1))
    with pytest.raises(ValueError, match="1 worker would need"):
        preflight.check_model(UpOptions(engine=beside, num_workers=1))
