"""Quantised experts of Qwen3-MoE and Mixtral in every format: read exactly, and served with the tokens of the same
plain numbers."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.kernels.cpu.grouped_linear import GroupedStack
from blockyard.kernels.selection import choose_backend
from blockyard.proto.naming.fingerprint import model_fingerprint
from blockyard.worker.model.config import UnsupportedModelError, load_config
from blockyard.worker.model.division import divide
from blockyard.worker.model.quantisation.scheme import QuantScheme
from blockyard.worker.model.quantisation.stored import quantised_modules
from blockyard.worker.model.shards import num_parameters, tensor_shapes, weights_bytes
from blockyard.worker.model.weights import ExpertWeights, load_weights
from safetensors.torch import load_file, save_file

from bench.quantise.recipes import Tensors, quantise_checkpoint

from .checkpoints import EXPERTS, make_checkpoint, shared_checkpoint
from .test_quantised_checkpoints import (
    CPU,
    RECIPES,
    assert_serves,
    change_scheme,
    change_tensors,
    plain,
    tensors_of,
)
from .test_recorded_steps import generate, make_runner

SIZES: dict[str, Any] = {"intermediate_size": 128}
FAMILIES = sorted(EXPERTS)
BOTH = pytest.mark.parametrize("family", FAMILIES)
_FOLDERS = tempfile.TemporaryDirectory(prefix="blockyard-quantised-experts-")


@cache
def checkpoints(family: str, name: str) -> tuple[Path, Path]:
    """Return a quantised checkpoint, and one in float32 with the same numbers."""
    quantised, plain_folder = (Path(_FOLDERS.name) / f"{family}-{name}{end}" for end in ("", "-plain"))
    quantise_checkpoint(shared_checkpoint(family, **SIZES), RECIPES[name], quantised, plain_folder)
    return quantised, plain_folder


def copy_of(folder: Path, family: str, name: str) -> Path:
    """Write a checkpoint that a test may change."""
    quantise_checkpoint(shared_checkpoint(family, **SIZES), RECIPES[name], folder)
    return folder


def experts_of(folder: Path, rank: int = 0, size: int = 1) -> list[ExpertWeights]:
    config = load_config(folder)
    part = divide(config, rank, size)
    weights = load_weights(folder, config, dtype=torch.float32, device=CPU, part=part)
    return [layer.experts for layer in weights.layers if layer.experts is not None]


def assert_reads_exactly(folder: Path, plain_folder: Path, rank: int = 0, size: int = 1) -> None:
    actual, expected = experts_of(folder, rank, size), experts_of(plain_folder, rank, size)
    assert actual, "no layer has experts"
    for experts, wanted in zip(actual, expected, strict=True):
        assert torch.equal(experts.gate_EH, wanted.gate_EH)
        for weights, plain_EOI in (
            (experts.gate_up_E2IH, wanted.gate_up_E2IH),
            (experts.down_EHI, wanted.down_EHI),
        ):
            assert len(weights) == len(plain_EOI)
            for weight, plain_OI in zip(weights, plain_EOI, strict=True):
                assert not isinstance(weight, torch.Tensor), "nothing is quantised"
                assert torch.equal(plain(weight), plain_OI)


@BOTH
@pytest.mark.parametrize("name", RECIPES)
def test_every_number_is_read_exactly(family: str, name: str) -> None:
    assert_reads_exactly(*checkpoints(family, name))


@pytest.mark.quick_cases(1)
@BOTH
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("deterministic", [True, False])
def test_greedy_tokens_are_those_of_transformers_on_the_same_numbers(
    family: str, name: str, deterministic: bool
) -> None:
    """Deterministic mode runs the torch backend, the other mode the cpu backend where there is a compiler."""
    folder, plain_folder = checkpoints(family, name)
    assert_serves(folder, plain_folder, deterministic=deterministic)


@BOTH
@pytest.mark.parametrize("name", ["w4a16", "w8a16", "int8", "fp8-blocks", "awq"])
def test_two_ranks_give_the_same_tokens(family: str, name: str) -> None:
    folder, plain_folder = divisible(family, name)
    for rank in range(2):
        assert_reads_exactly(folder, plain_folder, rank, 2)
    assert_serves(folder, plain_folder, size=2)


@cache
def divisible(family: str, name: str) -> tuple[Path, Path]:
    """Return checkpoints as `checkpoints` does, whose experts have whole groups for two ranks."""
    source = shared_checkpoint(family, **SIZES, moe_intermediate_size=64)
    quantised, plain_folder = (
        Path(_FOLDERS.name) / f"divisible-{family}-{name}{end}" for end in ("", "-plain")
    )
    quantise_checkpoint(source, RECIPES[name], quantised, plain_folder)
    return quantised, plain_folder


def test_ranks_that_would_cut_a_group_or_an_order_of_an_expert_are_refused() -> None:
    for name, why in (("w4a16", "24 inputs|whole runs of 16"), ("gptq-4-order", "act order")):
        folder, _ = checkpoints("Qwen3MoeForCausalLM", name)
        with pytest.raises(ValueError, match=why):
            divide(load_config(folder), 0, 2)
    folder, _ = divisible("MixtralForCausalLM", "gptq-4-order")
    with pytest.raises(ValueError, match="act order, which 2 ranks cannot share"):
        divide(load_config(folder), 0, 2)


@pytest.mark.parametrize("name", ["w4a16-asymmetric", "gptq-4-order", "gptq-8-order-asymmetric", "int8"])
def test_a_cpu_computes_with_the_numbers_as_they_are_stored(name: str) -> None:
    backend = choose_backend(CPU)
    if backend.name != "cpu":
        pytest.skip("no C++ kernels here")
    folder, _ = checkpoints("Qwen3MoeForCausalLM", name)
    weights = load_weights(folder, load_config(folder), dtype=torch.float32, device=CPU)
    weights.pack(backend)
    for layer in weights.layers:
        if layer.experts is not None:
            for stack in (layer.experts.gate_up_E2IH, layer.experts.down_EHI):
                assert isinstance(stack, GroupedStack)
                assert (stack.order_EI is not None) == ("order" in name)


@BOTH
@pytest.mark.parametrize("name", RECIPES)
def test_memory_is_counted_as_it_is_held(family: str, name: str) -> None:
    folder, _ = checkpoints(family, name)
    config = load_config(folder)
    assert config.quantisation is not None
    weights = load_weights(folder, config, dtype=torch.bfloat16, device=CPU)
    for experts in (layer.experts for layer in weights.layers):
        if experts is not None:
            experts.gate_EH = experts.gate_EH[: len(experts.down_EHI)].clone()
    parts = (weights, *weights.layers, *(layer.experts for layer in weights.layers if layer.experts))
    held = sum(
        tensor.nbytes
        for part in parts
        for value in (getattr(part, field) for field in part.__slots__ if field not in ("layers", "experts"))
        for weight in (value if isinstance(value, list) else [value])
        for tensor in ([weight] if isinstance(weight, torch.Tensor) else tensors_of(weight))
    )
    assert weights_bytes(config, 2, on_cpu=False) == held
    if config.quantisation.is_float:
        held = 2 * num_parameters(config)
    assert weights_bytes(config, 2, on_cpu=True) == held


def test_the_gate_and_what_the_scheme_leaves_out_are_plain(tmp_path: Path) -> None:
    """In a Mixtral's list, experts have Mixtral's names."""
    scheme = QuantScheme(format="awq", bits=4)
    assert not scheme.covers("model.layers.0.mlp.gate")
    assert scheme.covers("model.layers.0.mlp.gate_proj")
    for family, experts in (
        ("MixtralForCausalLM", "block_sparse_moe.experts"),
        ("Qwen3MoeForCausalLM", "mlp.experts"),
    ):
        folder = copy_of(tmp_path / family, family, "w4a16")
        for ignored in (f"re:.*{experts}.*", experts):
            change_scheme(folder, ignore=["lm_head", ignored])
            config = load_config(folder)
            modules = quantised_modules(tensor_shapes(config), config.quantisation)
            assert not any(".experts." in module for module in modules)
            assert "model.layers.0.self_attn.q_proj" in modules


def test_gptq_may_list_what_it_has_quantised_in_each_layer(tmp_path: Path) -> None:
    """optimum writes such a list, and has to be given one for a model with experts."""
    folder = copy_of(tmp_path, "Qwen3MoeForCausalLM", "gptq-4")
    kinds = ("gate_proj", "up_proj", "down_proj")
    listed = [["self_attn.o_proj"], [f"mlp.experts.{expert}.{kind}" for kind in kinds for expert in range(5)]]
    change_scheme(folder, modules_in_block_to_quantize=listed)
    config = load_config(folder)
    modules = quantised_modules(tensor_shapes(config), config.quantisation)
    expected = {f"model.layers.{layer}.self_attn.o_proj" for layer in range(3)}
    assert set(modules) == expected | {
        f"model.layers.{layer}.{name}" for layer in (0, 2) for name in listed[1]
    }
    for wrong in ("mlp", ["mlp.experts.0.up_proj"], [[1]]):
        change_scheme(folder, modules_in_block_to_quantize=wrong)
        with pytest.raises(UnsupportedModelError, match="modules_in_block_to_quantize="):
            load_config(folder)


def test_experts_of_one_layer_are_quantised_alike_or_refused_by_name(tmp_path: Path) -> None:
    folder = copy_of(tmp_path, "MixtralForCausalLM", "w4a16")
    name = "model.layers.1.block_sparse_moe.experts.2"
    change_scheme(folder, ignore=["lm_head", f"{name}.w2"])
    with pytest.raises(
        UnsupportedModelError, match=r"layers\.1\.mlp\.experts\.2\.down_proj is not quantised, but"
    ):
        weights_bytes(load_config(folder), 2, on_cpu=True)
    change_scheme(folder, ignore=["lm_head", f"{name}.w1"])
    with pytest.raises(UnsupportedModelError, match=r"experts\.2\.gate_proj is not quantised, but"):
        weights_bytes(load_config(folder), 2, on_cpu=True)


@BOTH
def test_a_quantised_gate_and_a_missing_scale_are_refused_by_name(family: str, tmp_path: Path) -> None:
    folder = copy_of(tmp_path, family, "w4a16")
    moe, down = ("block_sparse_moe", "w2") if family == "MixtralForCausalLM" else ("mlp", "down_proj")

    def quantise_gate(tensors: dict[str, torch.Tensor]) -> None:
        gate = f"model.layers.0.{moe}.gate"
        tensors[f"{gate}.weight_packed"] = tensors.pop(f"{gate}.weight").int()

    scale = f"model.layers.0.{moe}.experts.1.{down}.weight_scale"
    for change, why in (
        (lambda tensors: tensors.pop(scale), r"layers\.0\.mlp\.experts\.1\.down_proj\.weight_scale"),
        (quantise_gate, r"gate\.weight_packed' is unexpected"),
    ):
        change_tensors(folder, change)
        with pytest.raises(ValueError, match=why):
            load_weights(folder, load_config(folder), dtype=torch.float32, device=CPU)


def test_the_fingerprint_carries_the_scheme() -> None:
    fingerprints = {
        model_fingerprint(folder, load_format="auto", seed=0, dtype="torch:float32")
        for name in ("w4a16", "awq", "fp8-blocks")
        for folder in checkpoints("Qwen3MoeForCausalLM", name)
    }
    assert len(fingerprints) == 6


STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
NUM_EXPERTS = 4


def unstacked(tensors: Tensors) -> Tensors:
    """Return the tensors of a Llama 4 with a tensor for each matrix of each expert."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name in tensors.keys() - found.keys():
        head, _, stack = name.rpartition(".")
        for expert, whole_IO in enumerate(tensors[name]):
            for part, matrix_IO in zip(STACKS[stack], whole_IO.chunk(len(STACKS[stack]), dim=1), strict=True):
                found[f"{head}.{expert}.{part}.weight"] = matrix_IO.T.contiguous()
    return found


def stacked(tensors: Tensors) -> Tensors:
    """Return the tensors with one for each matrix of all experts, as transformers reads them."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for head in {name.partition(".experts.")[0] for name in tensors.keys() - found.keys()}:
        for stack, parts in STACKS.items():
            matrices = [
                torch.cat([tensors[f"{head}.experts.{expert}.{part}.weight"] for part in parts]).T
                for expert in range(NUM_EXPERTS)
            ]
            found[f"{head}.experts.{stack}"] = torch.stack(matrices).contiguous()
    return found


@pytest.mark.parametrize("name", ["w4a16", "fp8"])
def test_llama_4_is_served_with_its_experts_and_the_shared_one_quantised(name: str, tmp_path: Path) -> None:
    """The tools that quantise it store each expert by itself, and leave attention and gates in full precision."""
    sizes = {"intermediate_size": 48, "intermediate_size_mlp": 112, "num_local_experts": NUM_EXPERTS}
    fields = {"attention_chunk_size": 512, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 1]}
    source = make_checkpoint(tmp_path / "source", "Llama4ForCausalLM", **fields, **sizes)
    save_file(unstacked(load_file(source / "model.safetensors")), source / "model.safetensors")
    folder, plain_folder = tmp_path / "quantised", tmp_path / "plain"
    quantise_checkpoint(source, RECIPES[name], folder, plain_folder)
    exact = load_file(plain_folder / "model.safetensors")

    def leave_out_attention(tensors: Tensors) -> None:
        for one in [one for one in tensors if ".self_attn." in one]:
            del tensors[one]
        tensors.update({one: tensor for one, tensor in exact.items() if ".self_attn." in one})

    change_tensors(folder, leave_out_attention)
    change_scheme(folder, ignore=["re:.*lm_head", "re:.*self_attn", "re:.*feed_forward.router"])
    save_file(stacked(exact), plain_folder / "model.safetensors", metadata={"format": "pt"})
    assert_serves(folder, plain_folder)


def test_decode_steps_of_a_cpu_are_recorded() -> None:
    """PyTorch's operations would end the recording."""
    folder, _ = checkpoints("Qwen3MoeForCausalLM", "gptq-4-order")
    recorded = make_runner(checkpoint=folder)
    assert generate(recorded) == generate(make_runner(checkpoint=folder, records=False))
    assert recorded._graphs is not None
    assert set(recorded._graphs._graphs) == {(size, False) for size in (1, 2, 3, 4)}
