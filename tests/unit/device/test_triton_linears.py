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
from blockyard.worker.sequences.block_table import BlockTable
from blockyard.worker.sequences.identifiers import BlockId, SequenceId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import Sequence, token_array
from blockyard.worker.sequences.step_plan import ScheduledRow, StepPlan

from bench.quantise.recipes import quantise_checkpoint, recipes
from tests.unit.worker.checkpoints import reference_greedy, shared_checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GROUP = BLOCK = 32
PROMPT = tuple(range(20, 39))
NUM_TOKENS = 3
MIN_GAP = 2.5e-4


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["gptq-4-order", "int8", "fp8-blocks"])
def test_greedy_tokens_are_those_of_the_plain_numbers(tmp_path: Path, name: str) -> None:
    source = shared_checkpoint("Qwen2ForCausalLM", intermediate_size=128, num_hidden_layers=1)
    quantised, plain = tmp_path / "quantised", tmp_path / "plain"
    quantise_checkpoint(source, recipes(GROUP, BLOCK)[name], quantised, plain)
    expected = reference_greedy(plain, PROMPT, NUM_TOKENS)
    assert expected.min_gap > MIN_GAP
    config = load_config(quantised)
    weights = load_weights(quantised, config, dtype=torch.float32, device=DEVICE)
    runner = TorchRunner(config=config, weights=weights, backend=TritonBackend(), num_blocks=4, block_size=16)
    assert isinstance(weights.layers[0].down_HI, TiledWeight)
    assert greedy(runner) == expected.tokens


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["awq", "gptq-4-order", "int8", "fp8-blocks"])
@pytest.mark.parametrize("family", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_greedy_tokens_of_quantised_experts_are_those_of_the_plain_numbers(
    tmp_path: Path, family: str, name: str
) -> None:
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 1}
    source = shared_checkpoint(family, **sizes)
    quantised, plain = tmp_path / "quantised", tmp_path / "plain"
    quantise_checkpoint(source, recipes(GROUP, BLOCK)[name], quantised, plain)
    expected = reference_greedy(plain, PROMPT, NUM_TOKENS)
    assert expected.min_gap > MIN_GAP
    config = load_config(quantised)
    weights = load_weights(quantised, config, dtype=torch.float32, device=DEVICE)
    runner = TorchRunner(config=config, weights=weights, backend=TritonBackend(), num_blocks=4, block_size=16)
    experts = weights.layers[0].experts
    assert experts is not None
    assert isinstance(experts.gate_up_E2IH, TiledExperts)
    assert isinstance(experts.down_EHI, TiledExperts)
    assert greedy(runner) == expected.tokens


def greedy(runner: TorchRunner) -> tuple[int, ...]:
    sequence = Sequence(
        sequence_id=SequenceId(0),
        tokens=token_array(list(PROMPT)),
        prompt_length=len(PROMPT),
        sampling=SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS),
        names=[],
        block_table=BlockTable([BlockId(2), BlockId(0)]),
    )
    for step in range(NUM_TOKENS):
        start = sequence.num_computed
        num_tokens = len(sequence.tokens) - start
        row = ScheduledRow(sequence=sequence, start=start, num_tokens=num_tokens, samples=True)
        (token,) = runner.execute(StepPlan(step=step, rows=(row,))).tokens
        sequence.num_computed += num_tokens
        sequence.tokens.append(token)
    return tuple(sequence.tokens[len(PROMPT) :])
