"""Files that a worker has read: what counts as a change of them, and what does not."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from blockyard.proto.naming.fingerprint import model_fingerprint
from blockyard.worker.startup.files_read import FilesRead

MODEL = Path(__file__).parents[3] / "deploy" / "demo_model" / "checkpoint"

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
    model, draft = (Path(shutil.copytree(MODEL, tmp_path / folder)) for folder in ("model", "draft"))

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
