"""Equal models have equal fingerprints in any folder, and any change that alters a token alters the fingerprint."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blockyard.proto.naming import shard_digests
from blockyard.proto.naming.fingerprint import model_fingerprint, tokenizer_fingerprint
from blockyard.worker.config import EngineConfig
from blockyard.worker.startup import loading
from blockyard.worker.startup.files_read import FilesRead

from .checkpoints import make_checkpoint, shared_checkpoint
from .token_engines import DEMO


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


@pytest.fixture
def digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where digests are kept, of files that changed just now too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(shard_digests, "STABLE_SECONDS", 0.0)
    return tmp_path / "cache/blockyard/digests"


@pytest.mark.parametrize("place", [0.3, 0.5, 0.77])
def test_one_changed_byte_of_the_weights_is_noticed_wherever_it_is(
    folder: Path, digests: Path, place: float
) -> None:
    """Also where the file is as large and, by what is said of it, as old as before."""
    shard = folder / "model.safetensors"
    before, status = fingerprint(folder), shard.stat()
    time.sleep(0.02)  # beyond the granularity of the times of files
    with shard.open("r+b") as file:
        file.seek(int(status.st_size * place))
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert fingerprint(folder) != before


def test_bytes_are_hashed_once_and_what_is_kept_is_for_this_user_alone(folder: Path, digests: Path) -> None:
    before = fingerprint(folder)
    (kept,) = digests.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    assert digests.stat().st_mode & 0o777 == 0o700
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"sha256": "ab" * 32}))
    assert fingerprint(folder) != before, "the kept digest is what counts"
    kept.chmod(0o620)
    assert fingerprint(folder) == before, "but for one that others may have written"


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 4000, '{"identity": 1, "sha256": 7}'])
def test_a_broken_digest_is_made_anew(folder: Path, digests: Path, content: str) -> None:
    before = fingerprint(folder)
    (kept,) = digests.iterdir()
    kept.write_text(content)
    assert fingerprint(folder) == before
    assert json.loads(kept.read_text())["sha256"]


def test_a_file_that_changed_just_now_is_read_again(
    folder: Path, digests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be written once more within one tick of its clock."""
    monkeypatch.setattr(shard_digests, "STABLE_SECONDS", 1000.0)
    fingerprint(folder)
    assert not digests.exists()


def test_weights_that_change_while_they_are_loaded_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the hashed weights may differ from the loaded weights."""
    load = loading._load_runner

    def load_and_write(*arguments: Any) -> Any:
        loaded = load(*arguments)
        os.utime(folder / "model.safetensors")
        return loaded

    monkeypatch.setattr(loading, "_load_runner", load_and_write)
    with pytest.raises(ValueError, match="changed while they were loaded"):
        loading.load_engine(EngineConfig(model=str(folder), device="cpu", kv_cache_memory=2**24))


def test_where_nothing_can_be_kept_all_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert fingerprint(folder) == before


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


SHARD = "model.safetensors"


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


HARMS: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "new weights": (lambda model, _: flip(model / SHARD), "model changed: model.safetensors"),
    "half copied": (lambda model, _: cut(model / SHARD), "model changed: model.safetensors"),
    "one more shard": (
        lambda model, _: (model / "z.safetensors").write_bytes(b"x"),
        "z.safetensors",
    ),
    "tokenizer": (lambda model, _: cut(model / "tokenizer.json"), "tokenizer.json"),
    "chat template": (
        lambda model, _: (model / "chat_template.jinja").write_text("x"),
        "chat_template.jinja",
    ),
    "config gone": (lambda model, _: (model / "config.json").unlink(), "changed: config.json"),
    "folder gone": (lambda model, _: shutil.rmtree(model), "model is gone"),
    "draft model": (lambda _, draft: cut(draft / SHARD), "draft changed: model.safetensors"),
}


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", HARMS)
def test_a_change_of_any_file_that_a_start_would_read_is_told(name: str, tmp_path: Path) -> None:
    model, draft = (Path(shutil.copytree(DEMO, tmp_path / folder)) for folder in ("model", "draft"))

    def fingerprint() -> str:
        return model_fingerprint(model, load_format="safetensors", seed=0, dtype="float32")

    before, read = fingerprint(), FilesRead.of((model, model, draft))
    assert read.change(fingerprint, "") == ""
    (model / SHARD).touch()
    (model / "README.md").write_text("not a file of the model")
    assert read.change(fingerprint, before) == "", "the same weights, copied once more"
    harm, told = HARMS[name]
    harm(model, draft)
    assert told in read.change(fingerprint, before)
