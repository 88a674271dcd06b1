"""Checkpoints that tie head and embedding by config.json, and have a head of their own: the files decide."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.deploy.lifecycle.preflight import weights_bytes_of
from blockyard.deploy.settings.size import size_model
from blockyard.worker.config import EngineConfig
from blockyard.worker.model.config import load_config
from blockyard.worker.model.shards import num_parameters
from safetensors.torch import load_file, save_file

from .checkpoints import (
    TINY,
    assert_logits_equal_transformers,
    make_checkpoint,
    pool_by_last_token,
    reference_model,
    shared_checkpoint,
)
from .quantised import assert_reads_exactly, assert_serves, checkpoints, load
from .ranks import divided_engine
from .spoiling import change_config, change_tensors, copy_of, read_config
from .steps import Model
from .token_engines import assert_greedy, config_of, greedy, prompt_of, run, submit

HEAD_NUMEL = TINY["vocab_size"] * TINY["hidden_size"]
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen3MoeForCausalLM": {},
    "Gemma3ForCausalLM": {"sliding_window": 20},
    "Gemma3ForConditionalGeneration": {"sliding_window": 20},
    "Mistral3ForConditionalGeneration": {"model_type": "mistral"},
}


def tie(source: Path, folder: Path) -> Path:
    """Copy a checkpoint, and say in its config.json that the head is tied."""
    config = read_config(copy_of(source, folder))
    parts = {"tie_word_embeddings": True}
    if "text_config" in config:
        parts["text_config"] = config["text_config"] | parts
    return change_config(folder, **parts)


def bytes_in_plans(folder: Path) -> tuple[int, int]:
    """Return the bytes of the weights by `blockyard size` and by the check before a start."""
    engine = EngineConfig(model=str(folder), device="cpu", dtype="float32", kv_cache_memory=1 << 22)
    sized = size_model(
        str(folder),
        budget_bytes=1 << 22,
        block_size=16,
        dtype="float32",
        kv_cache_dtype="auto",
        on_cpu=True,
        max_model_len=None,
        draft_model=str(folder),
    )
    assert sized.draft_weights_bytes == sized.weights_bytes
    return sized.weights_bytes, weights_bytes_of(engine, load_config(folder), on_cpu=True)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_head_of_its_own_is_used_and_counted_and_a_warning_says_so(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    untied = shared_checkpoint(architecture, **ARCHITECTURES[architecture])
    folder = tie(untied, tmp_path / "tied")
    assert load_config(folder) == load_config(untied)
    assert num_parameters(load_config(folder)) == num_parameters(load_config(untied))
    assert bytes_in_plans(folder) == bytes_in_plans(untied)
    told = [record for record in caplog.records if "lm_head" in record.message]
    assert [(record.levelname, str(folder) in record.message) for record in told] == [("WARNING", True)]
    tokens = prompt_of(21)
    actual = Model(folder).logits(tokens)
    assert_logits_equal_transformers(actual, folder, list(tokens))
    assert_logits_equal_transformers(actual, untied, list(tokens))


@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_has_its_part_of_the_head(size: int, tmp_path: Path) -> None:
    untied = shared_checkpoint("Qwen3ForCausalLM")
    folder = tie(untied, tmp_path / "tied")
    with divided_engine(config_of(folder), size) as engine:
        request = submit(engine, prompt_of(37))
        assert_greedy(untied, prompt_of(37), run(engine)[request][0])
    assert greedy(folder, prompt_of(9), 4) == greedy(untied, prompt_of(9), 4), (
        "transformers takes the same head"
    )


def test_a_head_is_found_in_any_shard(tmp_path: Path) -> None:
    untied = tmp_path / "untied"
    reference_model(shared_checkpoint("Qwen3ForCausalLM")).save_pretrained(untied, max_shard_size="100KB")
    assert len(list(untied.glob("*.safetensors"))) > 2
    weights, expected = load(tie(untied, tmp_path / "tied")), load(untied)
    assert torch.equal(weights.lm_head_VH, expected.lm_head_VH)
    assert not torch.equal(weights.lm_head_VH, weights.embedding_VH)


@pytest.mark.parametrize("name", ["int8-tensor-head", "w4a16"])
def test_the_head_of_a_quantised_checkpoint_is_used_quantised_or_not(name: str, tmp_path: Path) -> None:
    quantised, plain = checkpoints(name)
    folder = tie(quantised, tmp_path / "tied")
    assert_reads_exactly(folder, plain)
    assert_serves(folder, plain)


def test_a_copy_of_the_embedding_stays_tied_and_takes_no_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    untied = make_checkpoint(tmp_path / "untied", "LlamaForCausalLM")
    change_tensors(untied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    folder = tie(untied, tmp_path / "tied")
    weights = load(folder)
    assert weights.lm_head_VH is weights.embedding_VH
    assert bytes_in_plans(folder) == tuple(held - 4 * HEAD_NUMEL for held in bytes_in_plans(untied))
    assert not caplog.records
    # One number makes the difference, also the last one.
    change_tensors(folder, lambda t: t["lm_head.weight"][-1].fill_(3.0))
    weights = load(folder)
    assert not torch.equal(weights.lm_head_VH, weights.embedding_VH)
    assert bytes_in_plans(folder) == bytes_in_plans(untied)


def test_a_head_that_the_files_lack_stays_tied_and_that_of_an_embedding_model_is_left(tmp_path: Path) -> None:
    without = make_checkpoint(tmp_path / "without", "LlamaForCausalLM", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(without / "model.safetensors")
    assert load_config(without).tie_word_embeddings
    embedding = tie(shared_checkpoint("Qwen3ForCausalLM"), tmp_path / "embedding")
    pool_by_last_token(embedding)
    assert load_config(embedding).tie_word_embeddings


def test_a_config_is_read_without_weights_and_beside_files_that_are_not_valid(tmp_path: Path) -> None:
    folder = tie(shared_checkpoint("Qwen3ForCausalLM"), tmp_path / "tied")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for content in (b"", whole[:5], whole[:100], b"\xff" * 40, b"\x02" + bytes(7) + b"[]", None):
        file.unlink() if content is None else file.write_bytes(content)
        assert load_config(folder).tie_word_embeddings
        with pytest.raises(ValueError, match="safetensors"):
            load(folder)


@pytest.mark.parametrize("offsets", [[0, 2**62], [2**63, 2**63 + 4], [-4, 4], [8, 4], [0, 8.5]])
def test_tensors_that_lie_outside_of_the_file_are_not_compared(offsets: list[float], tmp_path: Path) -> None:
    folder = tie(shared_checkpoint("Qwen3ForCausalLM"), tmp_path / "tied")
    entry = {"dtype": "F32", "shape": [1], "data_offsets": offsets}
    header = json.dumps({"lm_head.weight": entry, "model.embed_tokens.weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    assert load_config(folder).tie_word_embeddings


def test_a_head_of_another_shape_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    folder = tie(shared_checkpoint("Qwen3ForCausalLM"), tmp_path / "tied")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros(7, 64)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"'lm_head.weight' has shape \(7, 64\)"):
        load(folder)
