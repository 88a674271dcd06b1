"""Starts on model folders from untrusted authors, as an operator meets them: exit code, last words, and no code that
runs."""

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.router.rig import MODEL

EVIL = "from pathlib import Path\nPath(__file__).with_name('it-ran').touch()\nEvil = object\n"


class Bomb:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def with_long_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2 * 2**30) + b"{}" + bytes(64))


def with_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.bin").write_bytes(pickle.dumps(Bomb(folder / "it-ran")))


def with_fifo(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo model, to be spoilt."""
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


@pytest.mark.parametrize(
    ("program", "spoil", "named"),
    [
        ("worker", with_long_header, "model.safetensors"),
        ("worker", with_pickle, "pickled weights"),
        ("worker", with_fifo, "config.json is no regular file"),
        ("router", with_fifo, "config.json is no regular file"),
        ("router", without_tokenizer, "/model"),
    ],
)
def test_a_start_on_a_spoilt_folder_exits_1_with_a_sentence(
    folder: Path, program: str, spoil: Any, named: str
) -> None:
    spoil(folder)
    command = [sys.executable, "-m", f"blockyard.{program}", "--model", str(folder)]
    command += ["--device", "cpu"] if program == "worker" else []
    environment = {**os.environ, "BLOCKYARD_CLUSTER_SECRET": "x"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1, result.stderr
    assert named in result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    assert not (folder / "it-ran").exists()


def test_code_beside_a_tokenizer_never_runs(folder: Path) -> None:
    """The library chooses whether it is refused, or served by the plain tokenizer in the same folder."""
    (folder / "evil.py").write_text(EVIL)
    file = folder / "tokenizer_config.json"
    auto_map = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    changed = json.loads(file.read_text()) | {"auto_map": auto_map, "tokenizer_class": "Evil"}
    file.write_text(json.dumps(changed))
    loads = "from blockyard.proto.text import load_tokenizer; import sys; load_tokenizer(sys.argv[1])"
    subprocess.run([sys.executable, "-c", loads, str(folder)], capture_output=True, timeout=60, check=False)
    assert not (folder / "it-ran").exists()
