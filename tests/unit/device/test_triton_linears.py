"""Quantised checkpoints on Triton: the tokens of transformers on the same plain numbers.

With CUDA the kernels run natively, otherwise under Triton's interpreter.
"""

from pathlib import Path

import pytest
import torch
from blockyard.kernels.triton.backend import TritonBackend
from blockyard.kernels.triton.linears.weights import TiledExperts, TiledWeight
from blockyard.worker.execution.runner import TorchRunner
from blockyard.worker.model.config import load_config
from blockyard.worker.model.weights import load_weights

from bench.quantise.recipes import quantise_checkpoint, recipes
from tests.unit.worker.checkpoints import shared_checkpoint
from tests.unit.worker.steps import DEVICE, NEAR_GAP, generate, make_sequence
from tests.unit.worker.token_engines import greedy

SIZES = {"moe_intermediate_size": 64, "num_hidden_layers": 1}
PROMPT = tuple(range(20, 39))
EXPERTS = ("MixtralForCausalLM", "Qwen3MoeForCausalLM")
DENSE = [("Qwen2ForCausalLM", 128, name) for name in ("gptq-4-order", "int8", "fp8-blocks")]
MIXED = [(family, 64, name) for family in EXPERTS for name in ("awq", "gptq-4-order", "int8", "fp8-blocks")]
CASES = [DENSE[0], MIXED[0], *DENSE[1:], *MIXED[1:]]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("family", "intermediate_size", "name"), CASES)
def test_greedy_tokens_are_those_of_the_plain_numbers(
    tmp_path: Path, family: str, intermediate_size: int, name: str
) -> None:
    source = shared_checkpoint(family, intermediate_size=intermediate_size, **SIZES)
    folder, plain = tmp_path / "quantised", tmp_path / "plain"
    quantise_checkpoint(source, recipes(32, 32)[name], folder, plain)
    config = load_config(folder)
    weights = load_weights(folder, config, dtype=torch.float32, device=DEVICE)
    runner = TorchRunner(config=config, weights=weights, backend=TritonBackend(), num_blocks=4, block_size=16)
    if (experts := weights.layers[0].experts) is None:
        assert isinstance(weights.layers[0].down_HI, TiledWeight)
    else:
        assert isinstance(experts.gate_up_E2IH, TiledExperts)
        assert isinstance(experts.down_EHI, TiledExperts)
    tokens = generate(runner, [make_sequence(PROMPT, [2, 0])], 2, 1000)
    assert tokens == [greedy(plain, PROMPT, 2, NEAR_GAP)]
