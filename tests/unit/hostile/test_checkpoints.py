"""Model folders from untrusted authors: refused at start by a sentence that names the file, and none of their code
runs.

Starts of processes on such a folder are in tests/nightly/hostile/test_starts.py.
"""

import json
import os
import pickle
import re
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.proto.naming import model_files
from blockyard.proto.text import load_tokenizer
from blockyard.router.tokenizing.model_facts import read_facts
from blockyard.worker.config import EngineConfig
from blockyard.worker.model.config import resolve_model
from blockyard.worker.startup.loading import load_engine
from safetensors.torch import load_file, save_file

from tests.unit.router.rig import MODEL

SHARD = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"
MAX_SENTENCE = 1_000
Spoil = Callable[[Path], object]


MAKE_UNREADABLE: dict[str, Spoil] = {
    "FIFO": os.mkfifo,
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(os.path.relpath(path)),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo model, to be spoilt."""
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def with_header(header: bytes, data: bytes = b"\0" * 64, *, length: int | None = None) -> Spoil:
    def spoil(folder: Path) -> None:
        said = len(header) if length is None else length
        (folder / SHARD).write_bytes(struct.pack("<Q", said) + header + data)

    return spoil


def of_tensors(**places: tuple[int, int]) -> bytes:
    tensors = {name: {"dtype": "F32", "shape": [4], "data_offsets": place} for name, place in places.items()}
    return json.dumps(tensors).encode()


def with_tensor(change: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / SHARD)
        tensors[NORM] = change(tensors[NORM])
        save_file(tensors, folder / SHARD)

    return spoil


def with_index(content: object) -> Spoil:
    text = content if isinstance(content, str) else json.dumps(content)
    return lambda folder: (folder / INDEX).write_text(text)


def with_config(**changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return spoil


class Bomb:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._file,)


def with_pickle(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / SHARD).unlink()
        (folder / name).write_bytes(pickle.dumps(Bomb(folder / "it-ran")))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (with_header(b"{}", length=2 * 2**30), SHARD),
        (with_header(b"{}", length=2**64 - 1), SHARD),
        (with_header(b""), SHARD),
        (with_header(b"[1, 2]"), SHARD),
        (with_header(b"\xff" * 40), SHARD),
        (with_header(b'{"a":' * 5_000), SHARD),
        (with_header(of_tensors(a=(0, 16), b=(8, 24))), SHARD),
        (with_header(of_tensors(a=(0, 2**40))), SHARD),
        (with_header(of_tensors(a=(16, 0))), SHARD),
        (with_header(of_tensors(a=(0, 16), b=(32, 48))), SHARD),
        (lambda folder: (folder / SHARD).write_bytes(b"\x01"), SHARD),
        (lambda folder: os.truncate(folder / SHARD, 100_000), SHARD),
        (with_tensor(lambda norm: norm[:-1].clone()), NORM),
        (with_tensor(lambda norm: norm[None].clone()), NORM),
        (with_tensor(lambda norm: norm.to(torch.int8)), NORM),
        (with_tensor(lambda norm: norm.to(torch.float64)), NORM),
        (with_pickle("pytorch_model.bin"), "pickled weights"),
        (with_pickle("model.pt"), "pickled weights"),
        (with_pickle(SHARD), SHARD),
        (with_index("{"), INDEX),
        (with_index("[" * 100_000), INDEX),
        (with_index([]), INDEX),
        (with_index({}), INDEX),
        (with_index({"weight_map": {"a": 7}}), INDEX),
        (with_index({"weight_map": {"a": "../model/model.safetensors"}}), INDEX),
        (with_index({"weight_map": {"a": "/etc/passwd"}}), INDEX),
        (with_index({"weight_map": {"a": "."}}), INDEX),
        (with_config(num_hidden_layers=10**9), "num_hidden_layers"),
        (with_config(num_hidden_layers=2**23), "num_hidden_layers"),
        (with_config(hidden_size=2**63), "hidden_size"),
        (with_config(vocab_size=-1), "vocab_size"),
        (with_config(eos_token_id="2"), "config.json"),
        (with_config(rms_norm_eps={}), "config.json"),
        (with_config(layer_types=7), "config.json"),
        (with_config(architectures="x"), "architectures"),
        (with_config(auto_map={"AutoConfig": "evil.Config"}, architectures=["Evil"]), "architectures"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"), "config.json"),
    ],
)
def test_a_spoilt_checkpoint_is_refused_by_name(folder: Path, spoil: Spoil, named: str) -> None:
    (folder / "generation_config.json").unlink()
    spoil(folder)
    with pytest.raises(ValueError, match=re.escape(named)) as refused:
        load_engine(EngineConfig(model=str(folder), device="cpu", kv_cache_memory=2**25))
    assert len(str(refused.value)) < MAX_SENTENCE
    assert not (folder / "it-ran").exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "tokenizer.json").write_text("{"),
        lambda folder: (folder / "tokenizer.json").write_text('{"model": {"type": "BPE"}}'),
        lambda folder: (folder / "tokenizer.json").write_bytes(b"\xff\xfe"),
        lambda folder: (folder / "tokenizer_config.json").write_text("["),
        lambda folder: (folder / "config.json").write_text("[" * 100_000),
        with_config(vocab_size="many"),
    ],
)
def test_a_spoilt_tokenizer_is_refused_by_folder(folder: Path, spoil: Spoil) -> None:
    spoil(folder)
    with pytest.raises(ValueError, match=re.escape(str(folder))):
        read_facts(folder, names=("x",), tokenizer=load_tokenizer(folder))


@pytest.mark.parametrize("kind", MAKE_UNREADABLE)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", SHARD, INDEX])
def test_what_is_no_regular_file_is_refused_by_name_before_it_is_opened(
    folder: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)  # a socket's path must be short
    (folder / name).unlink(missing_ok=True)
    MAKE_UNREADABLE[kind](folder / name)
    with pytest.raises(ValueError, match=rf"{re.escape(name)} is no regular file"):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    ("name", "most_bytes"),
    [
        ("tokenizer.json", model_files.MAX_VOCABULARY_BYTES),
        ("tokenizer.model", model_files.MAX_VOCABULARY_BYTES),
        ("merges.txt", model_files.MAX_VOCABULARY_BYTES),
        (INDEX, model_files.MAX_VOCABULARY_BYTES),
        ("config.json", model_files.MAX_CONFIG_BYTES),
        ("tokenizer_config.json", model_files.MAX_CONFIG_BYTES),
        ("chat_template.jinja", model_files.MAX_CONFIG_BYTES),
        (f"{model_files.TEMPLATES_FOLDER}/tool.jinja", model_files.MAX_CONFIG_BYTES),
    ],
)
def test_a_file_that_is_too_large_is_refused_before_it_is_read(
    folder: Path, name: str, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    os.truncate(folder / name, most_bytes + 1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda _: pytest.fail("a file is read"))
        with pytest.raises(ValueError, match=rf"{re.escape(name)} has {most_bytes + 1} bytes"):
            resolve_model(str(folder))
    os.truncate(folder / name, most_bytes)
    assert resolve_model(str(folder)) == folder


def test_a_folder_of_many_files_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "MAX_FILES", len(list(folder.iterdir())))
    assert resolve_model(str(folder)) == folder
    (folder / "more").touch()
    with pytest.raises(ValueError, match="so it is no model folder"):
        resolve_model(str(folder))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_folder_that_names_code_of_its_own_is_refused(folder: Path, name: str) -> None:
    file = folder / name
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"auto_map": {}}))
    assert resolve_model(folder) == folder
    file.write_text(json.dumps(content | {"auto_map": {"AutoConfig": "evil.Config"}}))
    with pytest.raises(ValueError, match=rf"{re.escape(name)} names code of its own \(auto_map\)"):
        resolve_model(str(folder))
