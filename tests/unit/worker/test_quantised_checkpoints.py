"""Quantised checkpoints in every format: read exactly, and served with the tokens of the same plain numbers.

Of dense models, of models that store layers as one, and of models with experts.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.deploy.lifecycle.preflight import weights_bytes_of
from blockyard.kernels.cpu.grouped_linear import GroupedStack
from blockyard.kernels.selection import choose_backend
from blockyard.worker.config import EngineConfig
from blockyard.worker.model.config import UnsupportedModelError, load_config
from blockyard.worker.model.division import divide
from blockyard.worker.model.quantisation.scheme import QuantScheme
from blockyard.worker.model.quantisation.stored import quantised_modules
from blockyard.worker.model.shards import check_shards, num_parameters, tensor_shapes, weights_bytes
from safetensors.torch import load_file, save_file

from bench.quantise.recipes import recipes

from . import recording
from .quantised import (
    DENSE,
    FAMILIES,
    GROUP,
    PART,
    RECIPES,
    assert_reads_exactly,
    assert_serves,
    checkpoints,
    load,
    pair,
    source_of,
    tensors_of,
)
from .spoiling import Tensors, change_config, change_scheme, change_tensors, copy_of

PHI = "Phi3ForCausalLM"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": (DENSE, {}),
    "layers stored as one": (PHI, {}),
    "layers stored as one, heads rotated in part": (PHI, {"rope_parameters": PART}),
    **{family: (family, {}) for family in FAMILIES},
}


def of_model(model: str, name: str) -> tuple[Path, Path]:
    family, fields = MODELS[model]
    return checkpoints(name, family, **fields)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", RECIPES)
def test_every_number_is_read_exactly_and_counted_as_it_is_held(model: str, name: str) -> None:
    folder, plain_folder = of_model(model, name)
    divides = "order" not in name and model not in FAMILIES
    for size in (1, 2) if divides else (1,):
        assert_reads_exactly(folder, plain_folder, size)
    config, weights = load_config(folder), load(folder, dtype=torch.bfloat16)
    assert config.quantisation is not None
    for experts in (layer.experts for layer in weights.layers):
        if experts is not None:  # without the rows that pad it
            experts.gate_EH = experts.gate_EH[: len(experts.down_EHI)].clone()
    held = sum(tensor.nbytes for tensor in tensors_of(weights))
    assert weights_bytes(config, 2, on_cpu=False) == held
    on_cpu = 2 * num_parameters(config) if config.quantisation.is_float else held
    assert weights_bytes(config, 2, on_cpu=True) == on_cpu


def test_deterministic_mode_is_counted_with_the_plain_numbers_that_it_computes_with() -> None:
    folder = checkpoints("w4a16")[0]
    config, engine = load_config(folder), EngineConfig(model=str(folder), device="cpu", deterministic=True)
    assert weights_bytes_of(engine, config, on_cpu=True) == 4 * num_parameters(config)


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("model", [name for name in MODELS if name != "layers stored as one"])
def test_greedy_tokens_are_those_of_transformers_on_the_same_numbers(
    model: str, name: str, deterministic: bool
) -> None:
    """Deterministic mode runs the torch backend, the other mode the cpu backend where there is a compiler."""
    assert_serves(*of_model(model, name), deterministic=deterministic)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("family", [DENSE, *FAMILIES])
@pytest.mark.parametrize("name", ["w4a16", "int8-tensor-head", "fp8-blocks", "gptq-4-asymmetric-v2", "awq"])
def test_two_ranks_give_the_same_tokens(family: str, name: str) -> None:
    """Experts of this size have whole groups for two ranks."""
    folder, plain_folder = checkpoints(name, family, moe_intermediate_size=64)
    assert_reads_exactly(folder, plain_folder, 2)
    assert_serves(folder, plain_folder, size=2)


def test_ranks_that_would_cut_a_group_or_an_order_are_refused() -> None:
    experts, order = "Qwen3MoeForCausalLM", "in act order, which 2 ranks cannot share"
    for name, family, size, why in (
        ("gptq-4-order", DENSE, 128, f"o_proj has its columns {order}"),
        ("w4a16", DENSE, 80, "cannot share in whole runs of 16"),
        ("fp8-blocks", DENSE, 80, "cannot share in whole runs of 16"),
        ("w4a16", experts, 128, "24 inputs|whole runs of 16"),
        ("gptq-4-order", experts, 128, "act order"),
    ):
        config = replace(load_config(checkpoints(name, family)[0]), intermediate_size=size)
        with pytest.raises(ValueError, match=why):
            divide(config, 0, 2)
    config = load_config(checkpoints("gptq-4-order", "MixtralForCausalLM", moe_intermediate_size=64)[0])
    with pytest.raises(ValueError, match=order):
        divide(config, 0, 2)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("Gemma3ForCausalLM", {"sliding_window": 20}),
        ("Gemma3ForConditionalGeneration", {"sliding_window": 20}),
        ("Mistral3ForConditionalGeneration", {"model_type": "mistral"}),
        ("Olmo2ForCausalLM", {}),
    ],
)
@pytest.mark.parametrize("name", ["w4a16", "awq", "fp8-blocks"])
def test_other_families_are_served_quantised(
    architecture: str, fields: dict[str, Any], name: str, tmp_path: Path
) -> None:
    """The image part is left out, as the tools that make these checkpoints do. They name it in different ways."""
    folder, plain_folder = pair(tmp_path, source_of(architecture, **fields), name)
    if architecture.endswith("ForConditionalGeneration"):
        images = ["re:vision_tower.*", "re:multi_modal_projector.*", "language_model.lm_head"]
        lists = (
            {"ignore": images} if name == "w4a16" else {"modules_to_not_convert": ["vision_tower", "lm_head"]}
        )
        change_scheme(folder, **lists)
    assert_serves(folder, plain_folder)


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_scales_of_whole_matrices_may_have_the_names_that_transformers_gives_them(
    scheme: str, tmp_path: Path
) -> None:
    """Ministral 3 is published so."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 256}
    source = source_of("Ministral3ForCausalLM", rope_parameters=rope | {"llama_4_scaling_beta": 0.1})
    folder, plain_folder = pair(tmp_path, source, "fp8-tensor")

    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".weight_scale")]:
            tensors[f"{name}_inv"] = tensors.pop(name).reshape(())
            tensors.pop(name.replace("weight_scale", "input_scale"), None)
            if scheme == "static":
                tensors[name.replace("weight_scale", "activation_scale")] = torch.ones(())

    change_tensors(folder, rename)
    stated = {"quant_method": "fp8", "activation_scheme": scheme, "weight_block_size": None}
    stated["modules_to_not_convert"] = ["model.vision_tower", "lm_head"]
    assert_serves(change_config(folder, quantization_config=stated), plain_folder)


@pytest.mark.parametrize(
    ("recipe", "stated", "scales"),
    [
        ("fp8", {"num_bits": 8, "type": "float", "strategy": "tensor"}, ("k_scale", "v_scale")),
        ("int8", {"num_bits": 8}, ("k_proj.output_scale", "v_proj.output_scale")),
        ("fp8-blocks", "static", ("kv_scale", "k_proj.k_scale", "v_proj.v_scale")),
    ],
)
def test_scales_of_a_kv_cache_are_skipped(
    recipe: str, stated: object, scales: tuple[str, ...], tmp_path: Path
) -> None:
    folder, plain_folder = pair(tmp_path, source_of(DENSE), recipe)
    heads = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    added = {f"{head}.{scale}": torch.full((1,), 0.01) for head in heads for scale in scales}
    change_tensors(folder, lambda tensors: tensors.update(added))
    assert_reads_exactly(change_scheme(folder, kv_cache_scheme=stated), plain_folder)


def put_back(folder: Path, plain_folder: Path, module: str) -> None:
    """Store the layers whose names begin so in full precision."""
    exact = load_file(plain_folder / "model.safetensors")

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(module)]:
            del tensors[name]
        tensors.update({name: tensor for name, tensor in exact.items() if name.startswith(module)})

    change_tensors(folder, change)


def test_a_layer_of_the_text_part_is_left_out_by_its_name_there(tmp_path: Path) -> None:
    source = source_of("Mistral3ForConditionalGeneration", model_type="mistral")
    folder, plain_folder = pair(tmp_path, source, "w4a16")
    mlp = "language_model.model.layers.1.mlp"
    put_back(folder, plain_folder, f"{mlp}.")
    with pytest.raises(ValueError, match="is unexpected in a Mistral3"):
        check_shards(folder, load_config(folder))
    by_name = [f"{mlp}.{kind}_proj" for kind in ("gate", "up", "down")]
    for ignore in (by_name, [r"re:.*language_model\.model\.layers\.1\.mlp\..*"]):
        change_scheme(folder, ignore=["lm_head", *ignore])
        assert_serves(folder, plain_folder)
        weights = load(folder)
        assert isinstance(weights.layers[1].down_HI, torch.Tensor)
        quantised = (weights.layers[1].qkv_QH, weights.layers[0].down_HI)
        assert not any(isinstance(weight, torch.Tensor) for weight in quantised)


def test_shards_may_separate_the_tensors_of_a_layer(tmp_path: Path) -> None:
    folder, plain_folder = checkpoints("gptq-4-order")
    tensors = list(load_file(folder / "model.safetensors").items())
    names: dict[str, str] = {}
    for index in range(3):
        shard = dict(tensors[index::3])
        save_file(shard, tmp_path / f"model-{index}.safetensors")
        names |= dict.fromkeys(shard, f"model-{index}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert_reads_exactly(tmp_path, plain_folder)


def test_of_layers_that_are_stored_as_one_lists_name_the_one(tmp_path: Path) -> None:
    folder = pair(tmp_path, source_of(PHI), "w4a16")[0]
    scheme = load_config(folder).quantisation
    assert scheme is not None
    ignoring = replace(scheme, ignored=("model.layers.1.self_attn.qkv_proj",))
    assert [ignoring.covers(f"model.layers.{layer}.self_attn.k_proj") for layer in (0, 1)] == [True, False]
    name = "model.layers.1.self_attn.qkv_proj.weight_scale"
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"tensors are missing: 1, the first is '{name}'"):
        load(folder)


def test_blocks_without_whole_heads_are_refused_where_heads_are_rotated_in_part(tmp_path: Path) -> None:
    folder, _ = pair(tmp_path, source_of(PHI, rope_parameters=PART), recipes(GROUP, 8)["fp8-blocks"])
    with pytest.raises(UnsupportedModelError, match="blocks of 8 outputs have no whole heads of 16"):
        load_config(folder)


@pytest.mark.parametrize("name", ["w4a16-asymmetric", "gptq-4-order", "gptq-8-order-asymmetric", "int8"])
def test_a_cpu_computes_with_experts_as_they_are_stored(name: str) -> None:
    backend = choose_backend(torch.device("cpu"))
    if backend.name != "cpu":
        pytest.skip("no C++ kernels here")
    weights = load(checkpoints(name, "Qwen3MoeForCausalLM")[0])
    weights.pack(backend)
    for experts in (layer.experts for layer in weights.layers if layer.experts is not None):
        for stack in (experts.gate_up_E2IH, experts.down_EHI):
            assert isinstance(stack, GroupedStack)
            assert (stack.order_EI is not None) == ("order" in name)


def modules_of(folder: Path) -> list[str]:
    config = load_config(folder)
    return list(quantised_modules(tensor_shapes(config), config.quantisation))


def test_the_gate_and_what_the_scheme_leaves_out_are_plain(tmp_path: Path) -> None:
    """In a Mixtral's list, experts have Mixtral's names."""
    scheme = QuantScheme(format="awq", bits=4)
    assert not scheme.covers("model.layers.0.mlp.gate")
    assert scheme.covers("model.layers.0.mlp.gate_proj")
    for family, experts in zip(FAMILIES, ("block_sparse_moe.experts", "mlp.experts"), strict=True):
        folder = copy_of(checkpoints("w4a16", family)[0], tmp_path / family)
        for ignored in (f"re:.*{experts}.*", experts):
            modules = modules_of(change_scheme(folder, ignore=["lm_head", ignored]))
            assert not any(".experts." in module for module in modules)
            assert "model.layers.0.self_attn.q_proj" in modules


def test_gptq_may_list_what_it_has_quantised_in_each_layer(tmp_path: Path) -> None:
    """optimum writes such a list, and has to be given one for a model with experts."""
    folder = copy_of(checkpoints("gptq-4", "Qwen3MoeForCausalLM")[0], tmp_path)
    kinds = ("gate_proj", "up_proj", "down_proj")
    experts = [f"mlp.experts.{expert}.{kind}" for kind in kinds for expert in range(5)]
    change_scheme(folder, modules_in_block_to_quantize=[["self_attn.o_proj"], experts])
    expected = {f"model.layers.{layer}.self_attn.o_proj" for layer in range(3)}
    expected |= {f"model.layers.{layer}.{name}" for layer in (0, 2) for name in experts}
    assert set(modules_of(folder)) == expected
    for wrong in ("mlp", ["mlp.experts.0.up_proj"], [[1]]):
        with pytest.raises(UnsupportedModelError, match="modules_in_block_to_quantize="):
            load_config(change_scheme(folder, modules_in_block_to_quantize=wrong))


def test_experts_of_one_layer_are_quantised_alike_or_refused_by_name(tmp_path: Path) -> None:
    folder = copy_of(checkpoints("w4a16", "MixtralForCausalLM")[0], tmp_path)
    for stored, named in (("w2", r"layers\.1\.mlp\.experts\.2\.down_proj"), ("w1", r"experts\.2\.gate_proj")):
        change_scheme(folder, ignore=["lm_head", f"model.layers.1.block_sparse_moe.experts.2.{stored}"])
        with pytest.raises(UnsupportedModelError, match=f"{named} is not quantised, but"):
            weights_bytes(load_config(folder), 2, on_cpu=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantised_gate_and_a_missing_scale_are_refused_by_name(family: str, tmp_path: Path) -> None:
    folder = copy_of(checkpoints("w4a16", family)[0], tmp_path)
    moe, down = ("block_sparse_moe", "w2") if family == "MixtralForCausalLM" else ("mlp", "down_proj")
    gate, scale = f"model.layers.0.{moe}.gate", f"model.layers.0.{moe}.experts.1.{down}.weight_scale"

    def quantise_gate(tensors: Tensors) -> None:
        tensors[f"{gate}.weight_packed"] = tensors.pop(f"{gate}.weight").int()

    for change, why in (
        (lambda tensors: tensors.pop(scale), r"layers\.0\.mlp\.experts\.1\.down_proj\.weight_scale"),
        (quantise_gate, r"gate\.weight_packed' is unexpected"),
    ):
        with pytest.raises(ValueError, match=why):
            load(change_tensors(folder, change))


STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
NUM_EXPERTS = 4


def unstack(tensors: Tensors) -> None:
    """Store a tensor for each matrix of each expert of a Llama 4."""
    for name in [name for name in tensors if ".experts." in name]:
        head, _, stack = name.rpartition(".")
        for expert, whole_IO in enumerate(tensors.pop(name)):
            for part, matrix_IO in zip(STACKS[stack], whole_IO.chunk(len(STACKS[stack]), dim=1), strict=True):
                tensors[f"{head}.{expert}.{part}.weight"] = matrix_IO.T.contiguous()


def stack(tensors: Tensors) -> None:
    """Store one tensor for each matrix of all experts, as transformers reads them."""
    for head in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        for stacked, parts in STACKS.items():
            tensors[f"{head}.experts.{stacked}"] = torch.stack(
                [
                    torch.cat([tensors.pop(f"{head}.experts.{expert}.{part}.weight") for part in parts]).T
                    for expert in range(NUM_EXPERTS)
                ]
            )


@pytest.mark.parametrize("name", ["w4a16", "fp8"])
def test_llama_4_is_served_with_its_experts_and_the_shared_one_quantised(name: str, tmp_path: Path) -> None:
    """The tools that quantise it store each expert by itself, and leave attention and gates in full precision."""
    sizes = {"intermediate_size": 48, "intermediate_size_mlp": 112, "num_local_experts": NUM_EXPERTS}
    fields = {"attention_chunk_size": 512, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 1]}
    source = copy_of(source_of("Llama4ForCausalLM", **fields, **sizes), tmp_path / "source")
    folder, plain_folder = pair(tmp_path, change_tensors(source, unstack), name)
    for layer in range(3):
        put_back(folder, plain_folder, f"model.layers.{layer}.self_attn.")
    change_scheme(folder, ignore=["re:.*lm_head", "re:.*self_attn", "re:.*feed_forward.router"])
    assert_serves(folder, change_tensors(plain_folder, stack))


def test_decode_steps_of_a_cpu_are_recorded() -> None:
    """PyTorch's operations would end the recording."""
    folder, _ = checkpoints("gptq-4-order", "Qwen3MoeForCausalLM")
    recorded = recording.make_runner(folder)
    assert recording.generate(recorded) == recording.generate(recording.make_runner(folder, records=False))
    assert recording.recorded_sizes(recorded) == [1, 2, 3, 4]
