"""Copies of checkpoints whose files a test may change."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def copy_of(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to, dirs_exist_ok=True))


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def change_config(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(read_config(folder) | fields))
    return folder


def change_scheme(folder: Path, **fields: Any) -> Path:
    """Change how config.json says that the weights are quantised."""
    return change_config(folder, quantization_config=read_config(folder)["quantization_config"] | fields)


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, file, metadata={"format": "pt"})
    return folder
