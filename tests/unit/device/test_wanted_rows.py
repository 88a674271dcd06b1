"""A last layer that computes only the wanted rows has the same outputs and KV as one that computes all rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.kernels.attention.plan import AttentionPlan
from blockyard.worker.execution.runner import TorchRunner
from blockyard.worker.execution.step_inputs import StepInputs
from blockyard.worker.sequences.step_plan import ScheduledRow

from tests.unit.worker.checkpoints import ARCHITECTURES, shared_checkpoint
from tests.unit.worker.steps import DEVICE, execute, make_runner, make_sequences, row_of
from tests.unit.worker.token_engines import prompt_of

MODES: dict[str, dict[str, Any]] = {"plain": {}}
if DEVICE.type == "cpu":
    MODES |= {
        "torch": {"backend": "torch"},
        "deterministic": {"deterministic": True},
        "int8": {"linears": "int8"},
    }
EXACT = ("deterministic", "int8")
"""Modes in which a row's bits do not depend on how many there are beside it."""
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


def mixed_rows(runner: TorchRunner) -> list[ScheduledRow]:
    """Return the rows of one step. The KV of the positions before them is already computed."""
    sequences = make_sequences([prompt_of(80, seed=number) for number in range(len(ROWS))])
    steps = list(zip(sequences, ROWS, strict=True))
    execute(
        runner, *(row_of(one, 0, start)._replace(samples=False) for one, (start, _) in steps if start > 0)
    )
    return [row_of(sequence, start, end) for sequence, (start, end) in steps]


def inputs_of(runner: TorchRunner) -> StepInputs:
    arrays, _ = runner._inputs.arrays(tuple(mixed_rows(runner)))
    return runner._inputs_of(arrays)


def hidden(
    runner: TorchRunner, inputs: StepInputs, rows_plan: AttentionPlan | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the wanted rows, and the pools after the step."""
    pools = [pool.clone() for pool in runner.kv_pools]
    with torch.inference_mode():
        hidden_QH = runner._decoder.hidden(
            inputs.tokens_T, pools, inputs.plan, inputs.wanted_Q, rows_plan=rows_plan
        )
    return hidden_QH, pools


def note_mlps(runner: TorchRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets how many rows each call of an MLP has."""
    silu_mul, num_computed = runner.backend.silu_mul, []

    def counted(gate_up_T2I: torch.Tensor, *, out_TI: torch.Tensor) -> None:
        num_computed.append(len(gate_up_T2I))
        silu_mul(gate_up_T2I, out_TI=out_TI)

    monkeypatch.setattr(runner.backend, "silu_mul", counted)
    return num_computed


def assert_same_pools(pools: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for pool, wanted in zip(pools, expected, strict=True):
        torch.testing.assert_close(pool, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mode", MODES)
def test_wanted_rows_alone_are_as_among_all_and_the_pools_too(model: str, mode: str) -> None:
    architecture, overrides = MODELS[model]
    folder = shared_checkpoint(architecture, **overrides)
    try:
        runner = make_runner(folder, **MODES[mode])
    except ValueError as error:
        pytest.skip(str(error))
    inputs = inputs_of(runner)
    assert inputs.wanted_plan is not None
    alone_QH, pools = hidden(runner, inputs, inputs.wanted_plan)
    expected_QH, expected_pools = hidden(runner, inputs, None)
    assert not expected_QH.isnan().any()
    tolerance = 0.0 if mode in EXACT else TOLERANCE * expected_QH.abs().max().item()
    torch.testing.assert_close(alone_QH, expected_QH, rtol=0, atol=tolerance)
    assert_same_pools(pools, expected_pools)
    for pair in zip(pools, runner.kv_pools, strict=True):
        assert not torch.equal(*(pool.nan_to_num() for pool in pair)), "a layer has filled no block"


def test_an_mlp_in_pieces_has_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces hold 4 tokens, in a mode where each token's result does not depend on the others."""
    folder: Path = shared_checkpoint("LlamaForCausalLM")
    runner = make_runner(folder, deterministic=True, device=torch.device("cpu"))
    inputs = inputs_of(runner)
    expected_QH, expected_pools = hidden(runner, inputs, None)
    num_computed = note_mlps(runner, monkeypatch)
    monkeypatch.setattr(runner.backend, "mlp_rows", 4)
    in_pieces_QH, pools = hidden(runner, inputs, None)
    assert max(num_computed) == 4
    assert sum(num_computed) == inputs.plan.num_query_tokens * runner.config.num_layers
    assert torch.equal(in_pieces_QH, expected_QH)
    assert_same_pools(pools, expected_pools)


def test_the_last_layer_of_a_step_with_prompts_computes_only_their_last_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make_runner(shared_checkpoint("LlamaForCausalLM"))
    rows = mixed_rows(runner)
    num_computed = note_mlps(runner, monkeypatch)
    execute(runner, *rows)
    num_tokens = sum(row.num_tokens for row in rows)
    assert num_computed == [num_tokens, num_tokens, len(rows)]
