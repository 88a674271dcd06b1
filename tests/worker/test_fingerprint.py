"""Equal models have equal fingerprints wherever they lie; anything that changes a token changes them."""

import json
import shutil
from pathlib import Path

import pytest
from blockyard.proto.fingerprint import model_fingerprint, tokenizer_fingerprint

from .checkpoints import make_checkpoint, shared_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(shared_checkpoint("LlamaForCausalLM"), tmp_path / "model"))
    (copy / "tokenizer.json").write_text('{"model": {}}')
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    return copy


def fingerprint(folder: Path, *, load_format: str = "auto", seed: int = 0, dtype: str = "float32") -> str:
    return model_fingerprint(folder, load_format=load_format, seed=seed, dtype=dtype)


def test_a_copy_elsewhere_has_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "README.md").write_text("not part of the model")
    assert fingerprint(copy) == fingerprint(folder)
    assert tokenizer_fingerprint(copy) == tokenizer_fingerprint(folder)
    assert len(fingerprint(folder)) == len(tokenizer_fingerprint(folder)) == 64


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_tokenizer_and_chat_template_count_for_both(name: str, folder: Path) -> None:
    before = fingerprint(folder), tokenizer_fingerprint(folder)
    (folder / name).write_text("other")
    after = fingerprint(folder), tokenizer_fingerprint(folder)
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_content_that_moves_to_another_file_is_noticed(folder: Path) -> None:
    before = tokenizer_fingerprint(folder)
    (folder / "tokenizer.json").rename(folder / "tokenizer_config.json")
    assert tokenizer_fingerprint(folder) != before


def test_the_configuration_counts_for_the_model_alone(folder: Path) -> None:
    model, tokenizer = fingerprint(folder), tokenizer_fingerprint(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert fingerprint(folder) != model
    assert tokenizer_fingerprint(folder) == tokenizer


def test_other_weights_of_the_same_shapes_are_noticed(folder: Path, tmp_path: Path) -> None:
    """A base model and its fine-tune: shards of the same size, under the same header."""
    other = make_checkpoint(tmp_path / "other", "LlamaForCausalLM", seed=1)
    file, other_file = folder / "model.safetensors", other / "model.safetensors"
    assert file.stat().st_size == other_file.stat().st_size
    before = fingerprint(folder)
    shutil.copy(other_file, file)
    assert fingerprint(folder) != before


def test_data_type_and_load_format_count_and_the_seed_where_it_draws_weights(folder: Path) -> None:
    assert fingerprint(folder, dtype="bfloat16") != fingerprint(folder)
    assert fingerprint(folder, load_format="random") != fingerprint(folder)
    assert fingerprint(folder, load_format="random", seed=1) != fingerprint(folder, load_format="random")
    assert fingerprint(folder, seed=1) == fingerprint(folder)


def test_random_weights_need_no_shard(folder: Path) -> None:
    before = fingerprint(folder, load_format="random")
    (folder / "model.safetensors").unlink()
    assert fingerprint(folder, load_format="random") == before


def test_a_file_that_is_no_safetensors_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
        fingerprint(folder)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        fingerprint(tmp_path)
