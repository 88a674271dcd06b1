"""Tiny random checkpoints in Hugging Face format, and the results that transformers computes from them.

Weights, norms and biases are drawn wider than a fresh model's, so every tensor matters to the result. The most probable
token then leads the second by a clear gap.
"""

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
TEXT_CONFIGS = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}
"""Where transformers has a config for the model alone that reads no images."""
VISION: dict[str, dict[str, Any]] = {
    "gemma3": {"image_size": 28, "patch_size": 14},
    "llama4": {"image_size": 28, "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32},
    "mistral3": {"image_size": 32, "patch_size": 16, "head_dim": 16},
}
"""Fields of the part that reads images, beside those of every one."""


def config_of(architecture: str, **fields: Any) -> Any:
    """Return the config that transformers has for a model of these fields. Where it reads images, they are of its text
    part."""
    family = architecture.partition("For")[0]
    if not architecture.endswith("ForConditionalGeneration"):
        return getattr(transformers, TEXT_CONFIGS.get(family, f"{family}Config"))(**fields)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return getattr(transformers, f"{family}Config")(
        text_config=fields,
        vision_config=vision | VISION[family.lower()],
        tie_word_embeddings=fields["tie_word_embeddings"],
    )


TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 272,
    "max_position_embeddings": 512,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [1],
    },
}
"""Fields of a model with experts, beside `TINY`."""
WEIGHT_STD = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyContinuation:
    tokens: tuple[int, ...]
    min_gap: float
    """The least lead of a chosen token's logit over the second."""


def make_model(architecture: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A tiny random model. Overrides are fields of the transformers config."""
    config = config_of(architecture, **(TINY | EXPERTS.get(architecture, {}) | overrides))
    model: PreTrainedModel = getattr(transformers, architecture)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(center + WEIGHT_STD * torch.randn(parameter.shape, generator=generator))
    return model


def make_checkpoint(folder: Path, architecture: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny random model to `folder`."""
    make_model(architecture, seed=seed, **overrides).save_pretrained(folder)
    return folder


def make_embedding_checkpoint(
    folder: Path, architecture: str, *, normalizes: bool = True, is_bare: bool = True, **overrides: Any
) -> Path:
    """Write a tiny random embedding model to `folder`, as sentence-transformers does. With `is_bare` its tensors are
    named without `model.`, and it has no head."""
    model = make_model(architecture, **overrides)
    (model.model if is_bare else model).save_pretrained(folder)
    pool_by_last_token(folder, normalizes=normalizes)
    return folder


def pool_by_last_token(folder: Path, *, normalizes: bool = True) -> None:
    """Write the files of sentence-transformers that make a checkpoint an embedding model."""
    places = {"Transformer": "", "Pooling": "1_Pooling"} | (
        {"Normalize": "2_Normalize"} if normalizes else {}
    )
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(places.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": TINY["hidden_size"], "include_prompt": True}
    modes = ("cls_token", "mean_tokens", "lasttoken")
    pooling |= {f"pooling_mode_{mode}": mode == "lasttoken" for mode in modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def reference_embedding(folder: Path, tokens: list[int], *, normalizes: bool = True) -> torch.Tensor:
    """Return the last token's hidden state behind the last norm, as transformers computes it in fp32."""
    with torch.inference_mode():
        hidden_H: torch.Tensor = _bare_model(folder)(torch.tensor([tokens])).last_hidden_state[0, -1]
    return torch.nn.functional.normalize(hidden_H, dim=-1) if normalizes else hidden_H


@functools.cache
def _bare_model(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModel.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def shared_checkpoint(architecture: str, **overrides: Any) -> Path:
    """make_checkpoint once a process; not to be changed by a test."""
    return _shared_checkpoint(architecture, json.dumps(overrides, sort_keys=True))


@functools.cache
def _shared_checkpoint(architecture: str, overrides: str) -> Path:
    folder = tempfile.mkdtemp(prefix=architecture, dir=_shared_folder().name)
    return make_checkpoint(Path(folder), architecture, **json.loads(overrides))


@functools.cache
def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """transformers' own model on the CPU."""
    [architecture] = json.loads((folder / "config.json").read_text())["architectures"]
    reads_images = architecture.endswith("ForConditionalGeneration")
    kind = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
    model: PreTrainedModel = kind.from_pretrained(folder, dtype=dtype, experts_implementation="eager")
    return model.eval()


def reference_logits(folder: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the logits that transformers computes: (T, V)."""
    with torch.inference_mode():
        logits_TV: torch.Tensor = reference_model(folder, dtype)(torch.tensor([tokens])).logits[0]
    return logits_TV


def assert_logits_equal_transformers(actual_TV: torch.Tensor, folder: Path, tokens: list[int]) -> None:
    """Assert that logits are as near to double precision as those of transformers in fp32 on the same CPU.

    An absolute bound would depend on the order of sums on this CPU. Logits of these weights are usually off by 5e-6,
    and at times by 1e-4. In the double-precision reference only norms, rotary angles and the weights of experts are
    fp32. With CUDA the bound is absolute.
    """
    actual_TV = actual_TV.cpu()
    assert actual_TV.dtype == torch.float32
    if torch.cuda.is_available():
        torch.testing.assert_close(actual_TV, reference_logits(folder, tokens), atol=2e-3, rtol=2e-3)
        return
    double_TV = reference_logits(folder, tokens, torch.float64)
    assert actual_TV.shape == double_TV.shape
    typical = (reference_logits(folder, tokens) - double_TV).square().mean().sqrt()
    errors_TV = (actual_TV - double_TV).abs() / typical
    of_all, of_a_token = errors_TV.square().mean().sqrt(), errors_TV.square().mean(dim=1).sqrt().max()
    assert of_all <= 2
    assert of_a_token <= 12
    assert errors_TV.max() <= 40


@functools.cache
def reference_greedy(folder: Path, prompt: tuple[int, ...], num_tokens: int) -> GreedyContinuation:
    """Return the greedy tokens of transformers, computed by whole forward passes without a cache."""
    tokens, gaps = list(prompt), []
    for _ in range(num_tokens):
        with torch.inference_mode():
            logits_V = reference_model(folder)(torch.tensor([tokens])).logits[0, -1]
        first, second = logits_V.topk(2).values.tolist()
        gaps.append(first - second)
        tokens.append(int(logits_V.argmax()))
    return GreedyContinuation(tokens=tuple(tokens[len(prompt) :]), min_gap=min(gaps))


@functools.cache
def _shared_folder() -> tempfile.TemporaryDirectory[str]:
    """Removed when the interpreter ends, and the cache with it."""
    return tempfile.TemporaryDirectory(prefix="blockyard-checkpoints-")
