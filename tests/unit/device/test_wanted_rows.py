"""A last layer that computes only the wanted rows has the same outputs and KV as one that computes all rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.kernels.attention.plan import AttentionPlan
from blockyard.worker.execution.runner import TorchRunner
from blockyard.worker.execution.step_inputs import StepInputs
from blockyard.worker.sequences.block_table import BlockTable
from blockyard.worker.sequences.identifiers import BlockId, SequenceId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import Sequence, token_array
from blockyard.worker.sequences.step_plan import ScheduledRow, StepPlan

from tests.unit.worker.checkpoints import ARCHITECTURES, make_checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODES: dict[str, dict[str, Any]] = {"plain": {}}
if DEVICE.type == "cpu":
    MODES |= {
        "torch": {"backend": "torch"},
        "deterministic": {"deterministic": True},
        "int8": {"linears": "int8"},
    }
EXACT = (MODES.get("deterministic"), MODES.get("int8"))
"""Where a row's bits do not depend on how many there are beside it."""
TOLERANCE = 1e-5 if DEVICE.type == "cpu" else 2e-3
"""Largest difference, as a share of the largest value."""
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 20}
FULL, SLIDING = "full_attention", "sliding_attention"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{architecture: (architecture, {}) for architecture in ARCHITECTURES},
    "large": ("LlamaForCausalLM", {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}),
    "window": ("MistralForCausalLM", {"sliding_window": 20}),
    "window, last layer": ("Qwen3ForCausalLM", QWEN_WINDOW | {"layer_types": [FULL, FULL, SLIDING]}),
    "window, but last layer": ("Qwen2ForCausalLM", QWEN_WINDOW | {"layer_types": [SLIDING, SLIDING, FULL]}),
}
ROWS = [(29, 30), (74, 75), (0, 1), (20, 37), (7, 61), (0, 53)]
"""From which position to which, of prompts of 80 tokens: decodes, a first token, chunks, and a beginning."""
BLOCKS_A_ROW = 5


@pytest.fixture(params=MODES)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MODES[request.param]


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    architecture, overrides = MODELS[request.param]
    return make_checkpoint(tmp_path, architecture, **overrides)


def make_runner(folder: Path, options: dict[str, Any], device: torch.device = DEVICE) -> TorchRunner:
    """Return a runner with NaN in every unwritten block."""
    try:
        runner = TorchRunner.create(
            folder, device=device, dtype="float32", num_blocks=64, block_size=16, **options
        )
    except ValueError as error:
        if "linears" not in options:
            raise
        pytest.skip(str(error))
    for pool in runner.kv_pools:
        pool.fill_(float("nan"))
    return runner


def inputs_of(runner: TorchRunner) -> StepInputs:
    arrays, _ = runner._inputs.arrays(mixed_rows(runner))
    return runner._inputs_of(arrays)


def mixed_rows(runner: TorchRunner) -> tuple[ScheduledRow, ...]:
    """Return the rows of one step. The KV of the positions before them is already computed."""
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randperm(64, generator=generator).tolist()
    sequences = [
        Sequence(
            sequence_id=SequenceId(number),
            tokens=token_array(torch.randint(3, 272, (80,), generator=generator).tolist()),
            prompt_length=80,
            sampling=SamplingParams(temperature=0.0),
            names=[],
            block_table=BlockTable(map(BlockId, blocks[number * BLOCKS_A_ROW :][:BLOCKS_A_ROW])),
        )
        for number in range(len(ROWS))
    ]
    steps = list(zip(sequences, ROWS, strict=True))
    before = [ScheduledRow(sequence, 0, start, samples=False) for sequence, (start, _) in steps if start]
    runner.execute(StepPlan(step=0, rows=tuple(before)))
    return tuple(ScheduledRow(sequence, start, end - start, samples=True) for sequence, (start, end) in steps)


def hidden(
    runner: TorchRunner, inputs: StepInputs, rows_plan: AttentionPlan | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The wanted rows, and the pools after the step."""
    pools = [pool.clone() for pool in runner.kv_pools]
    with torch.inference_mode():
        hidden_QH = runner._decoder.hidden(
            inputs.tokens_T, pools, inputs.plan, inputs.wanted_Q, rows_plan=rows_plan
        )
    return hidden_QH, pools


def test_wanted_rows_alone_are_as_among_all_and_the_pools_too(folder: Path, options: dict[str, Any]) -> None:
    runner = make_runner(folder, options)
    inputs = inputs_of(runner)
    assert inputs.wanted_plan is not None
    alone_QH, pools = hidden(runner, inputs, inputs.wanted_plan)
    expected_QH, expected_pools = hidden(runner, inputs, None)
    assert not expected_QH.isnan().any()
    tolerance = 0.0 if options in EXACT else TOLERANCE * expected_QH.abs().max().item()
    torch.testing.assert_close(alone_QH, expected_QH, rtol=0, atol=tolerance)
    for pool, expected in zip(pools, expected_pools, strict=True):
        torch.testing.assert_close(pool, expected, rtol=0, atol=0, equal_nan=True)
    written = [
        not torch.equal(*(p.nan_to_num() for p in pair)) for pair in zip(pools, runner.kv_pools, strict=True)
    ]
    assert all(written), "the step has filled blocks in every layer"


def test_an_mlp_in_pieces_has_the_same_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pieces hold 4 tokens, in a mode where each token's result does not depend on the others."""
    folder = make_checkpoint(tmp_path, "LlamaForCausalLM")
    runner = make_runner(folder, {"deterministic": True}, torch.device("cpu"))
    inputs = inputs_of(runner)
    expected_QH, expected_pools = hidden(runner, inputs, None)
    silu_mul, num_computed = runner.backend.silu_mul, []

    def counted(gate_up_T2I: torch.Tensor, *, out_TI: torch.Tensor) -> None:
        num_computed.append(len(gate_up_T2I))
        silu_mul(gate_up_T2I, out_TI=out_TI)

    monkeypatch.setattr(runner.backend, "silu_mul", counted)
    monkeypatch.setattr(runner.backend, "mlp_rows", 4)
    in_pieces_QH, pools = hidden(runner, inputs, None)
    assert max(num_computed) == 4
    assert sum(num_computed) == inputs.plan.num_query_tokens * runner.config.num_layers
    assert torch.equal(in_pieces_QH, expected_QH)
    for pool, expected in zip(pools, expected_pools, strict=True):
        torch.testing.assert_close(pool, expected, rtol=0, atol=0, equal_nan=True)


def test_the_last_layer_of_a_step_with_prompts_computes_only_their_last_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runner = make_runner(make_checkpoint(tmp_path, "LlamaForCausalLM"), {})
    rows = mixed_rows(runner)
    silu_mul, num_computed = runner.backend.silu_mul, []

    def counted(gate_up_T2I: torch.Tensor, *, out_TI: torch.Tensor) -> None:
        num_computed.append(len(gate_up_T2I))
        silu_mul(gate_up_T2I, out_TI=out_TI)

    monkeypatch.setattr(runner.backend, "silu_mul", counted)
    runner.execute(StepPlan(step=1, rows=rows))
    num_tokens = sum(row.num_tokens for row in rows)
    assert num_computed == [num_tokens, num_tokens, len(rows)]
