"""Decode steps on a CPU whose kernels run as one call: the same numbers for any batch, and no step left out."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from blockyard.kernels.attention.plan import AttentionPlan, plan_attention
from blockyard.kernels.cpu.backend import CpuBackend
from blockyard.kernels.cpu.library import CpuLibrary
from blockyard.kernels.cpu.recording import Arena
from blockyard.kernels.torch.packed_linear import can_pack
from blockyard.worker.execution.step_graphs import MAX_CPU_ROWS, sizes_for
from blockyard.worker.sequences.step_plan import FAILED_TOKEN

from .checkpoints import ARCHITECTURES, shared_checkpoint
from .recording import CPU, assert_records_and_generates, generate, graphs_of, make_runner, recorded_sizes
from .token_engines import engine_of


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("architecture", [one for one in ARCHITECTURES if one != "MistralForCausalLM"])
def test_tokens_are_those_of_transformers(architecture: str, overlap: bool) -> None:
    assert_records_and_generates(shared_checkpoint(architecture), overlap_steps=overlap)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"linears": "int8"},
        {"linears": "int8", "folder": shared_checkpoint("Qwen3MoeForCausalLM")},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "fp8", "dtype": "bfloat16"},
    ],
)
def test_any_numbers_are_the_same_recorded_or_not(settings: dict[str, Any]) -> None:
    recorded = make_runner(**settings)
    if graphs_of(recorded) is None:
        assert settings["dtype"] == "bfloat16"
        assert not recorded.backend._library.has_linear(is_bf16=True), "no AMX: nothing is left to PyTorch"
    assert generate(recorded) == generate(make_runner(records=False, **settings))


def some_plan(contexts: list[int], first_block: int) -> AttentionPlan:
    tables = [[first_block + 2 * row, first_block + 2 * row + 1] for row in range(len(contexts))]
    return plan_attention(
        query_lens=[1] * len(contexts),
        context_lens=contexts,
        block_tables=tables,
        block_size=16,
        device=CPU,
        num_kv_heads=2,
    )


@pytest.fixture
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_hidden_states_and_pools_are_the_same_bits_step_after_step(inference: None) -> None:
    """A size that was captured with one step is replayed with others, shorter ones too."""
    runner = make_runner()
    graphs = graphs_of(runner)
    for pool in runner.kv_pools:
        pool.normal_()
    for contexts, first in (([30, 5, 17], 0), ([2, 31, 1], 6), ([9], 3), ([32, 32, 32], 12), ([1, 1], 20)):
        plan, tokens_T = some_plan(contexts, first), torch.randint(3, 200, (len(contexts),))
        pools = [pool.clone() for pool in runner.kv_pools]
        expected = runner._decoder.hidden(tokens_T, pools, plan, None)
        actual = graphs.hidden(tokens_T, plan)
        assert actual is not None
        assert torch.equal(actual, expected)
        assert all(torch.equal(*pair) for pair in zip(pools, runner.kv_pools, strict=True))


def test_a_step_that_points_beyond_the_pool_is_refused_before_anything_is_read(inference: None) -> None:
    graphs = graphs_of(make_runner())
    for _ in range(2):
        with pytest.raises(ValueError, match="beyond"):
            graphs.hidden(torch.tensor([5]), some_plan([20], 23))
        assert graphs.hidden(torch.tensor([5]), some_plan([20], 22)) is not None


def test_a_token_beyond_the_vocabulary_fails_its_own_row(inference: None) -> None:
    hidden_TH = graphs_of(make_runner()).hidden(torch.tensor([5, 100_000, 7]), some_plan([3, 3, 3], 0))
    assert hidden_TH.isfinite().all(dim=-1).tolist() == [True, False, True]


def test_a_model_that_pytorch_computes_in_part_runs_as_before(caplog: pytest.LogCaptureFixture) -> None:
    """Half-precision floats have no C++ kernels."""
    caplog.set_level("INFO")
    runner = make_runner(dtype="float16")
    assert graphs_of(runner) is None
    assert "decode graphs: none, aten" in caplog.text
    assert all(FAILED_TOKEN not in tokens for tokens in generate(runner))


ODD = {"hidden_size": 328, "intermediate_size": 521, "head_dim": 64}
"""Sizes that the C++ linears do not take. Every matrix is large enough for PyTorch to pack it."""


@pytest.mark.parametrize(
    ("architecture", "sizes", "settings"),
    [
        ("LlamaForCausalLM", {"hidden_size": 328, "head_dim": 64}, {}),
        ("LlamaForCausalLM", {"hidden_size": 128, "intermediate_size": 521}, {}),
        ("LlamaForCausalLM", ODD | {"vocab_size": 271, "tie_word_embeddings": True}, {}),
        ("LlamaForCausalLM", ODD, {"max_loras": 1, "max_lora_rank": 8}),
        ("LlamaForCausalLM", ODD, {"linears": "int8"}),
        ("Qwen3MoeForCausalLM", ODD | {"moe_intermediate_size": 265}, {}),
        ("LlamaForCausalLM", ODD | {"hidden_size": 320, "intermediate_size": 512}, {"dtype": "bfloat16"}),
    ],
)
def test_a_model_with_weights_that_only_pytorch_reads_runs_unrecorded(
    architecture: str,
    sizes: dict[str, int],
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With AMX the linears in bf16 are PyTorch's, whatever their sizes."""
    if settings.get("dtype") == "bfloat16":
        monkeypatch.setattr(CpuLibrary, "has_linear", lambda *_, is_bf16: not is_bf16)
    caplog.set_level("INFO")
    checkpoint = shared_checkpoint(architecture, **sizes)
    runner = make_runner(checkpoint, **settings)
    assert graphs_of(runner) is None
    if can_pack(runner.dtype):
        assert "decode graphs: none, mkldnn._linear_pointwise" in caplog.text, "no weight was packed"
    generated = generate(runner)
    assert generated == generate(make_runner(checkpoint, records=False, **settings))
    if runner.dtype == torch.float32 and "linears" not in settings:
        settings = settings | {"backend": "torch"}
        assert generated == generate(make_runner(checkpoint, records=False, **settings))


def test_no_failure_of_a_recording_ends_a_worker_or_a_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = generate(make_runner(records=False))
    later = make_runner()
    for error in (MemoryError(), RuntimeError("can't allocate memory"), ValueError("a table")):
        with monkeypatch.context() as patch:
            patch.setattr(Arena, "empty", raises(error))
            at_start = make_runner()
            if not isinstance(error, ValueError):
                assert generate(later) == expected
        assert graphs_of(at_start) is None
        assert [record.levelname for record in caplog.records if "none, " in record.message] == ["WARNING"]
        assert generate(at_start) == expected
        caplog.clear()
        assert recorded_sizes(later) == [1], "sizes whose recording failed are not tried again"


def raises(error: Exception) -> Callable[..., torch.Tensor]:
    def empty(*_: object) -> torch.Tensor:
        raise error

    return empty


def test_there_is_a_size_for_every_small_batch_and_none_for_a_large_one() -> None:
    backend = make_runner().backend
    assert isinstance(backend, CpuBackend)
    for most, largest in ((1000, MAX_CPU_ROWS), (3, 3)):
        sizes = sizes_for(backend, CPU, most)
        assert sizes is not None
        assert sizes.rows == tuple(range(1, largest + 1))


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_worker_records_unless_it_is_told_not_to(enforce_eager: bool) -> None:
    make_runner()  # where it can be recorded at all
    runner = engine_of(shared_checkpoint("Qwen3ForCausalLM"), enforce_eager=enforce_eager).runner
    assert (graphs_of(runner) is None) == enforce_eager  # type: ignore[arg-type]
