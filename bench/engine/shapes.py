"""Models of the benchmarks: well-known shapes with random weights, or any checkpoint folder.

transformers writes a shape as a folder in Hugging Face's format, so that every system loads the same file. Its
tokenizer is the demo's, with its vocabulary extended to the model's size. Owns these folders only.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[2] / "deploy" / "demo_model" / "checkpoint"
SEED = 0
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Architecture and sizes of a model, from which its config.json follows."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    tied: bool
    rope_theta: float

    @property
    def has_head_norms(self) -> bool:
        """Whether each head of queries and keys has an RMS norm."""
        return self.architecture == "Qwen3ForCausalLM"

    def config(self, dtype: str) -> dict[str, Any]:
        return {
            "architectures": [self.architecture],
            "model_type": {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}[self.architecture],
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": self.tied,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "dtype": dtype,
            "bos_token_id": 0,
            "eos_token_id": 2,
        }


SHAPES = {
    # 166M parameters, grouped queries 16 to 4, small enough for two cores.
    "llama-166m": Shape(
        architecture="LlamaForCausalLM",
        layers=12,
        hidden=1024,
        heads=16,
        kv_heads=4,
        head_dim=64,
        intermediate=2752,
        vocab=32000,
        context=16384,
        tied=True,
        rope_theta=10000.0,
    ),
    # TinyLlama's: all inputs are multiples of 256, as llama.cpp's types and groups of 128 need.
    "llama-1.1b": Shape(
        architecture="LlamaForCausalLM",
        layers=22,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=64,
        intermediate=5632,
        vocab=32000,
        context=2048,
        tied=False,
        rope_theta=10000.0,
    ),
    # Little KV and much attention: on links of 10 Mbit/s to 1 Gbit/s a pull begins to pay at 3 to 300 blocks.
    "llama-thin": Shape(
        architecture="LlamaForCausalLM",
        layers=2,
        hidden=512,
        heads=32,
        kv_heads=1,
        head_dim=32,
        intermediate=1024,
        vocab=32000,
        context=16384,
        tied=True,
        rope_theta=10000.0,
    ),
    "qwen3-0.6b": Shape(
        architecture="Qwen3ForCausalLM",
        layers=28,
        hidden=1024,
        heads=16,
        kv_heads=8,
        head_dim=128,
        intermediate=3072,
        vocab=151936,
        context=40960,
        tied=True,
        rope_theta=1e6,
    ),
    "qwen3-8b": Shape(
        architecture="Qwen3ForCausalLM",
        layers=36,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=12288,
        vocab=151936,
        context=40960,
        tied=False,
        rope_theta=1e6,
    ),
    "qwen3-14b": Shape(
        architecture="Qwen3ForCausalLM",
        layers=40,
        hidden=5120,
        heads=40,
        kv_heads=8,
        head_dim=128,
        intermediate=17408,
        vocab=151936,
        context=40960,
        tied=False,
        rope_theta=1e6,
    ),
    "llama-3.1-8b": Shape(
        architecture="LlamaForCausalLM",
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14336,
        vocab=128256,
        context=131072,
        tied=False,
        rope_theta=500000.0,
    ),
}


def model_folder(model: str, dtype: str, folder: Path, *, with_weights: bool) -> Path:
    """Return the folder of a model: a shape's name, `demo`, or a checkpoint folder, which stays unchanged.

    A shape is written into `folder`. Without weights, the loader must draw random ones. Raise ValueError for an unknown
    name.
    """
    if model == "demo":
        return DEMO
    if model not in SHAPES:
        if not (Path(model) / "config.json").exists():
            raise ValueError(f"model {model!r} is neither {', '.join(SHAPES)}, demo, nor a checkpoint folder")
        return Path(model)
    target = folder / f"{model}-{dtype}"
    if (target / "tokenizer.json").exists():
        return target  # An earlier run has completed it: the tokenizer is written last.
    target.mkdir(parents=True, exist_ok=True)
    config = SHAPES[model].config(dtype)
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    if with_weights:
        _write_weights(target, dtype)
    _write_tokenizer(target, SHAPES[model].vocab)
    return target


def _write_weights(folder: Path, dtype: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(SEED)
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer whose vocabulary is filled up with unused words, so that every token can be decoded."""
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO / name, folder / name)
    path = folder / TOKENIZER_FILES[0]
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"<word{token}>": token for token in range(len(vocabulary), vocab_size)}
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
