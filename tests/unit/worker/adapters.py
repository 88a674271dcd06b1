"""Tiny random adapters in PEFT's format, and the checkpoints that have them merged into their weights."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

MODULES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
}


def make_adapter(
    folder: Path,
    checkpoint: Path,
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8,
    modules: Sequence[str] = tuple(MODULES),
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write a random adapter of a checkpoint to `folder`. It changes the result by about as much as the weights
    themselves."""
    weights, generator = load_file(checkpoint / "model.safetensors"), torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.split(".")[-1] in modules and "vision_tower" not in module:
            outputs, inputs = weight.shape
            scale = float(weight.float().std()) * (rank / alpha) / rank**0.5
            sides = {"A": torch.randn(rank, inputs, generator=generator)}
            sides["B"] = torch.randn(outputs, rank, generator=generator) * scale
            for side, drawn in sides.items():
                tensors[f"base_model.model.{module}.lora_{side}.weight"] = drawn.to(dtype)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    written = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(modules),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(written | config))
    return folder


def merge(checkpoint: Path, adapter: Path, folder: Path) -> Path:
    """Write the checkpoint with an adapter merged into its weights to `folder`."""
    shutil.copytree(checkpoint, folder)
    weights = load_file(checkpoint / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"] ** (0.5 if config.get("use_rslora") else 1)
    for name in tensors:
        if name.endswith("lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b_OR = tensors[name.replace("lora_A", "lora_B")].double()
            weight = weights[f"{module}.weight"].double()
            weights[f"{module}.weight"] = (weight + scale * (b_OR @ tensors[name].double())).float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
