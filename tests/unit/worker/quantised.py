"""Quantised checkpoints of tiny models, each beside one in float32 with the same numbers.

bench/quantise/recipes.py writes them, apart from the reader.
"""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from blockyard.kernels.quantised import QuantisedWeight, dequantised
from blockyard.worker.model.config import load_config
from blockyard.worker.model.division import divide
from blockyard.worker.model.weights import load_weights

from bench.quantise.recipes import quantise_checkpoint, recipes

from .checkpoints import EXPERTS, shared_checkpoint
from .ranks import divided_engine
from .token_engines import config_of, greedy, prompt_of, run, submit

CPU = torch.device("cpu")
GROUP = BLOCK = 16
RECIPES = recipes(GROUP, BLOCK)
NUM_TOKENS = 8
DENSE = "Qwen2ForCausalLM"
FAMILIES = sorted(EXPERTS)
PART = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_FOLDERS = tempfile.TemporaryDirectory(prefix="blockyard-quantised-")


def source_of(family: str, **fields: Any) -> Path:
    return shared_checkpoint(family, **({"intermediate_size": 128} | fields))


def pair(folder: Path, source: Path, recipe: str | Any) -> tuple[Path, Path]:
    """Write a quantised checkpoint, and one in float32 with the same numbers."""
    quantised, plain = folder / "quantised", folder / "plain"
    quantise_checkpoint(source, RECIPES[recipe] if isinstance(recipe, str) else recipe, quantised, plain)
    return quantised, plain


def checkpoints(name: str, family: str = DENSE, **fields: Any) -> tuple[Path, Path]:
    """Return such a pair, which no test may change."""
    return _checkpoints(name, family, json.dumps(fields))


@cache
def _checkpoints(name: str, family: str, fields: str) -> tuple[Path, Path]:
    folder = Path(tempfile.mkdtemp(dir=_FOLDERS.name))
    return pair(folder, source_of(family, **json.loads(fields)), name)


def plain(weight: torch.Tensor | QuantisedWeight) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else dequantised(weight)


def load(folder: Path, rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    config = load_config(folder)
    return load_weights(folder, config, dtype=dtype, device=CPU, part=divide(config, rank, size))


def assert_reads_exactly(folder: Path, plain_folder: Path, size: int = 1) -> None:
    """Assert that each rank has exactly the numbers that it has of the plain checkpoint."""
    for rank in range(size):
        actual, expected = load(folder, rank, size), load(plain_folder, rank, size)
        assert torch.equal(plain(actual.lm_head_VH), plain(expected.lm_head_VH))
        for layer, wanted in zip(actual.layers, expected.layers, strict=True):
            pairs = [(layer.qkv_QH, wanted.qkv_QH), (layer.attention_out_HA, wanted.attention_out_HA)]
            if wanted.experts is None:
                pairs += [(layer.gate_up_2IH, wanted.gate_up_2IH), (layer.down_HI, wanted.down_HI)]
            else:
                assert torch.equal(layer.experts.gate_EH, wanted.experts.gate_EH)
                for field in ("gate_up_E2IH", "down_EHI"):
                    one, other = getattr(layer.experts, field), getattr(wanted.experts, field)
                    pairs += zip(one, other, strict=True)
            for weight, plain_OI in pairs:
                assert not isinstance(weight, torch.Tensor), "nothing is quantised"
                assert torch.equal(dequantised(weight), plain_OI)
            assert (layer.qkv_bias_Q is None) == (wanted.qkv_bias_Q is None)
            if layer.qkv_bias_Q is not None:
                assert torch.equal(layer.qkv_bias_Q, wanted.qkv_bias_Q)


def assert_serves(folder: Path, plain_folder: Path, *, size: int = 1, **settings: Any) -> None:
    """Assert that the engine gives the tokens of transformers on the plain checkpoint, with a cached prefix too."""
    longer = prompt_of(48) + prompt_of(9, seed=4)
    with divided_engine(config_of(folder, num_blocks=80, **settings), size) as engine:
        first = submit(engine, prompt_of(48), NUM_TOKENS)
        answers = run(engine)
        second, third = submit(engine, longer, NUM_TOKENS), submit(engine, prompt_of(11), NUM_TOKENS)
        answers |= run(engine)
    assert answers[second][1] == 48, "the prefix was not reused"
    for key, prompt in ((first, prompt_of(48)), (second, longer), (third, prompt_of(11))):
        assert answers[key][0] == greedy(plain_folder, prompt, NUM_TOKENS)


def tensors_of(part: Any) -> list[torch.Tensor]:
    """Return all tensors of weights, of a layer, or of a quantised matrix."""
    if isinstance(part, torch.Tensor):
        return [part]
    if isinstance(part, list | tuple):
        return [tensor for each in part for tensor in tensors_of(each)]
    fields = getattr(type(part), "__slots__", ())
    return [tensor for field in fields for tensor in tensors_of(getattr(part, field))]
