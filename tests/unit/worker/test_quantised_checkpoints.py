"""Quantised checkpoints in every format: read exactly, and served with the tokens of the same plain numbers.

bench/quantise/recipes.py writes them, apart from the reader.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.deploy.lifecycle.preflight import weights_bytes_of
from blockyard.kernels.quantised import QuantisedWeight, dequantised
from blockyard.worker.config import EngineConfig
from blockyard.worker.model.config import UnsupportedModelError, load_config
from blockyard.worker.model.division import divide
from blockyard.worker.model.shards import check_shards, num_parameters, weights_bytes
from blockyard.worker.model.weights import load_weights
from safetensors.torch import load_file, save_file

from bench.quantise.recipes import Recipe, Tensors, compressed_int, quantise_checkpoint, recipes

from .checkpoints import make_checkpoint, reference_greedy, shared_checkpoint
from .ranks import divided_engine
from .test_engine_tokens import MIN_GAP, prompt_of, run, submit

CPU = torch.device("cpu")
GROUP = BLOCK = 16
SIZES: dict[str, Any] = {"intermediate_size": 128}
RECIPES = recipes(GROUP, BLOCK)
NUM_TOKENS = 8
_FOLDERS = tempfile.TemporaryDirectory(prefix="blockyard-quantised-")


@cache
def checkpoints(name: str) -> tuple[Path, Path]:
    """Return a quantised checkpoint, and one in float32 with the same numbers."""
    quantised, plain = Path(_FOLDERS.name) / name, Path(_FOLDERS.name) / f"{name}-plain"
    quantise_checkpoint(shared_checkpoint("Qwen2ForCausalLM", **SIZES), RECIPES[name], quantised, plain)
    return quantised, plain


def write(folder: Path, recipe: Recipe, **sizes: Any) -> Path:
    source = make_checkpoint(folder / "source", "Qwen3ForCausalLM", **(SIZES | sizes))
    quantise_checkpoint(source, recipe, folder / "quantised")
    return folder / "quantised"


def change_scheme(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= fields
    file.write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def plain(weight: torch.Tensor | QuantisedWeight) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else dequantised(weight)


def assert_reads_exactly(folder: Path, plain_folder: Path, size: int = 1) -> None:
    """Assert that each rank has exactly the numbers that it has of the plain checkpoint."""
    for rank in range(size):
        config, plain_config = load_config(folder), load_config(plain_folder)
        actual = load_weights(
            folder, config, dtype=torch.float32, device=CPU, part=divide(config, rank, size)
        )
        expected = load_weights(
            plain_folder, plain_config, dtype=torch.float32, device=CPU, part=divide(plain_config, rank, size)
        )
        assert torch.equal(plain(actual.lm_head_VH), plain(expected.lm_head_VH))
        for layer, wanted in zip(actual.layers, expected.layers, strict=True):
            for field in ("qkv_QH", "attention_out_HA", "gate_up_2IH", "down_HI"):
                weight = getattr(layer, field)
                assert not isinstance(weight, torch.Tensor), "nothing is quantised"
                assert torch.equal(dequantised(weight), getattr(wanted, field)), field
            assert (layer.qkv_bias_Q is None) == (wanted.qkv_bias_Q is None)
            if layer.qkv_bias_Q is not None:
                assert torch.equal(layer.qkv_bias_Q, wanted.qkv_bias_Q)


@pytest.mark.parametrize("name", RECIPES)
def test_every_number_is_read_exactly(name: str) -> None:
    assert_reads_exactly(*checkpoints(name))


@pytest.mark.parametrize("name", [name for name in RECIPES if "order" not in name])
def test_every_rank_reads_its_part_exactly(name: str) -> None:
    assert_reads_exactly(*checkpoints(name), size=2)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("deterministic", [True, False])
def test_greedy_tokens_are_those_of_transformers_on_the_same_numbers(name: str, deterministic: bool) -> None:
    """Deterministic mode runs the torch backend, the other mode the cpu backend where there is a compiler."""
    folder, plain_folder = checkpoints(name)
    assert_serves(folder, plain_folder, deterministic=deterministic)


@pytest.mark.parametrize("name", ["w4a16", "int8-tensor-head", "fp8-blocks", "gptq-4-asymmetric-v2"])
def test_two_ranks_give_the_same_tokens(name: str) -> None:
    folder, plain_folder = checkpoints(name)
    assert_serves(folder, plain_folder, size=2)


def assert_serves(folder: Path, plain_folder: Path, *, size: int = 1, **settings: Any) -> None:
    """Assert that the engine gives the tokens of transformers on the plain checkpoint, with a cached prefix too."""
    config = EngineConfig(model=str(folder), device="cpu", kv_cache_memory=1 << 20, block_size=16, **settings)
    longer = prompt_of(48) + prompt_of(9, seed=4)
    with divided_engine(config, size) as engine:
        first = submit(engine, prompt_of(48), NUM_TOKENS)
        answers = run(engine)
        second, third = submit(engine, longer, NUM_TOKENS), submit(engine, prompt_of(11), NUM_TOKENS)
        answers |= run(engine)
    assert answers[second][1] == 48, "the prefix was not reused"
    for key, prompt in ((first, prompt_of(48)), (second, longer), (third, prompt_of(11))):
        expected = reference_greedy(plain_folder, prompt, NUM_TOKENS)
        assert expected.min_gap > MIN_GAP, "the reference itself is undecided: choose another prompt"
        assert answers[key][0] == list(expected.tokens)


@pytest.mark.parametrize("name", ["w4a16", "awq", "fp8-blocks"])
@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("Gemma3ForCausalLM", {"sliding_window": 20}),
        ("Gemma3ForConditionalGeneration", {"sliding_window": 20}),
        ("Mistral3ForConditionalGeneration", {"model_type": "mistral"}),
        ("Olmo2ForCausalLM", {}),
    ],
)
def test_other_families_are_served_quantised(
    architecture: str, fields: dict[str, Any], name: str, tmp_path: Path
) -> None:
    """The image part is left out, as the tools that make these checkpoints do. They name it in different ways."""
    source = shared_checkpoint(architecture, **SIZES, **fields)
    folder, plain_folder = tmp_path / "quantised", tmp_path / "plain"
    quantise_checkpoint(source, RECIPES[name], folder, plain_folder)
    if architecture.endswith("ForConditionalGeneration"):
        key = "ignore" if name == "w4a16" else "modules_to_not_convert"
        images = ["re:vision_tower.*", "re:multi_modal_projector.*", "language_model.lm_head"]
        change_scheme(folder, **{key: images if name == "w4a16" else ["vision_tower", "lm_head"]})
    assert_serves(folder, plain_folder)


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_scales_of_whole_matrices_may_have_the_names_that_transformers_gives_them(
    scheme: str, tmp_path: Path
) -> None:
    """Ministral 3 is published so."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 256}
    fields = SIZES | {"rope_parameters": rope | {"llama_4_scaling_beta": 0.1}}
    source = make_checkpoint(tmp_path / "source", "Ministral3ForCausalLM", **fields)
    folder, plain_folder = tmp_path / "quantised", tmp_path / "plain"
    quantise_checkpoint(source, RECIPES["fp8-tensor"], folder, plain_folder)

    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".weight_scale")]:
            tensors[f"{name}_inv"] = tensors.pop(name).reshape(())
            tensors.pop(name.replace("weight_scale", "input_scale"), None)
            if scheme == "static":
                tensors[name.replace("weight_scale", "activation_scale")] = torch.ones(())

    change_tensors(folder, rename)
    stated = {"quant_method": "fp8", "activation_scheme": scheme, "weight_block_size": None}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    change_scheme(folder, modules_to_not_convert=["model.vision_tower", "lm_head"])
    assert_serves(folder, plain_folder)


@pytest.mark.parametrize(
    ("recipe", "stated", "scales"),
    [
        ("fp8", {"num_bits": 8, "type": "float", "strategy": "tensor"}, ("k_scale", "v_scale")),
        ("int8", {"num_bits": 8}, ("k_proj.output_scale", "v_proj.output_scale")),
        ("fp8-blocks", "static", ("kv_scale",)),
        ("fp8-blocks", "static", ("k_proj.k_scale", "v_proj.v_scale")),
    ],
)
def test_scales_of_a_kv_cache_are_skipped(
    recipe: str, stated: object, scales: tuple[str, ...], tmp_path: Path
) -> None:
    folder, plain_folder = tmp_path / "quantised", tmp_path / "plain"
    quantise_checkpoint(shared_checkpoint("Qwen2ForCausalLM", **SIZES), RECIPES[recipe], folder, plain_folder)

    def add_scales(tensors: Tensors) -> None:
        tensors |= {
            f"model.layers.{layer}.self_attn.{scale}": torch.full((1,), 0.01)
            for layer in range(2)
            for scale in scales
        }

    change_tensors(folder, add_scales)
    change_scheme(folder, kv_cache_scheme=stated)
    assert_serves(folder, plain_folder)


def test_a_layer_of_the_text_part_is_left_out_by_its_name_there(tmp_path: Path) -> None:
    source = shared_checkpoint("Mistral3ForConditionalGeneration", **SIZES, model_type="mistral")
    quantise_checkpoint(source, RECIPES["w4a16"], tmp_path / "quantised", tmp_path / "plain")
    folder, exact = tmp_path / "quantised", load_file(tmp_path / "plain" / "model.safetensors")
    left_out = [f"language_model.model.layers.1.mlp.{kind}_proj" for kind in ("gate", "up", "down")]

    def put_back(tensors: Tensors) -> None:
        for module in left_out:
            for name in [name for name in tensors if name.startswith(f"{module}.")]:
                del tensors[name]
            tensors[f"{module}.weight"] = exact[f"{module}.weight"]

    change_tensors(folder, put_back)
    with pytest.raises(ValueError, match="is unexpected in a Mistral3"):
        check_shards(folder, load_config(folder))
    for ignore in (left_out, [r"re:.*language_model\.model\.layers\.1\.mlp\..*"]):
        change_scheme(folder, ignore=["lm_head", *ignore])
        assert_serves(folder, tmp_path / "plain")


def test_shards_may_separate_the_tensors_of_a_layer(tmp_path: Path) -> None:
    folder, plain_folder = checkpoints("gptq-4-order")
    names: dict[str, str] = {}
    shards: list[Tensors] = [{}, {}, {}]
    for index, (name, tensor) in enumerate(load_file(folder / "model.safetensors").items()):
        shards[index % 3][name] = tensor
        names[name] = f"model-{index % 3}.safetensors"
    for index, tensors in enumerate(shards):
        save_file(tensors, tmp_path / f"model-{index}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert_reads_exactly(tmp_path, plain_folder)


def test_layers_on_the_ignore_list_stay_in_full_precision(tmp_path: Path) -> None:
    folder = write(tmp_path, compressed_int(4, GROUP))
    source = load_file(tmp_path / "source/model.safetensors")

    def restore(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.1.mlp.")]:
            del tensors[name]
        tensors.update({n: t for n, t in source.items() if n.startswith("model.layers.1.mlp.")})

    change_tensors(folder, restore)
    change_scheme(folder, ignore=["lm_head", "re:model.layers.1.mlp.*"])
    weights = load_weights(folder, load_config(folder), dtype=torch.float32, device=CPU)
    assert isinstance(weights.layers[1].down_HI, torch.Tensor)
    assert torch.equal(weights.layers[1].down_HI, source["model.layers.1.mlp.down_proj.weight"])
    assert not isinstance(weights.layers[1].qkv_QH, torch.Tensor)
    assert not isinstance(weights.layers[0].down_HI, torch.Tensor)


@pytest.mark.parametrize("name", RECIPES)
def test_memory_is_counted_as_it_is_held(name: str) -> None:
    config = load_config(checkpoints(name)[0])
    assert config.quantisation is not None
    weights = load_weights(checkpoints(name)[0], config, dtype=torch.bfloat16, device=CPU)
    held = sum(
        tensor.nbytes
        for part in (weights, *weights.layers)
        for value in (getattr(part, field) for field in part.__slots__ if field != "layers")
        for tensor in ([value] if isinstance(value, torch.Tensor) else tensors_of(value))
    )
    assert weights_bytes(config, 2, on_cpu=False) == held
    on_cpu = weights_bytes(config, 2, on_cpu=True)
    assert on_cpu == 2 * num_parameters(config) if config.quantisation.is_float else on_cpu == held


def test_deterministic_mode_is_counted_with_the_plain_numbers_that_it_computes_with() -> None:
    folder = checkpoints("w4a16")[0]
    config, engine = load_config(folder), EngineConfig(model=str(folder), device="cpu", deterministic=True)
    assert weights_bytes_of(engine, config, on_cpu=True) == 4 * num_parameters(config)


def tensors_of(weight: QuantisedWeight | None) -> list[torch.Tensor]:
    if weight is None:
        return []
    values = [getattr(weight, field) for field in weight.__slots__]
    return [value for value in values if isinstance(value, torch.Tensor)]


PHI: dict[str, dict[str, Any]] = {
    "phi": {},
    "phi, heads rotated in part": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    },
}
"""Models whose checkpoints have queries, keys and values, and likewise gate and up, in one layer."""


@cache
def fused_source(model: str) -> Path:
    return make_checkpoint(Path(_FOLDERS.name) / model, "Phi3ForCausalLM", **SIZES, **PHI[model])


@cache
def fused_checkpoints(model: str, name: str) -> tuple[Path, Path]:
    quantised, plain = (Path(_FOLDERS.name) / f"{model}-{name}{end}" for end in ("", "-plain"))
    quantise_checkpoint(fused_source(model), RECIPES[name], quantised, plain)
    return quantised, plain


@pytest.mark.parametrize("model", PHI)
@pytest.mark.parametrize("name", RECIPES)
def test_layers_that_are_stored_as_one_are_read_exactly(model: str, name: str) -> None:
    folder, plain_folder = fused_checkpoints(model, name)
    for size in (1,) if "order" in name else (1, 2):
        assert_reads_exactly(folder, plain_folder, size=size)


@pytest.mark.parametrize(
    "name", ["w4a16-asymmetric", "int8-tensor-head", "fp8-blocks", "awq", "gptq-4-order"]
)
def test_layers_that_are_stored_as_one_give_the_same_tokens(name: str) -> None:
    assert_serves(*fused_checkpoints("phi, heads rotated in part", name))


def test_of_layers_that_are_stored_as_one_lists_name_the_one(tmp_path: Path) -> None:
    folder, _ = fused_checkpoints("phi", "w4a16")
    scheme = load_config(folder).quantisation
    assert scheme is not None
    ignoring = replace(scheme, ignored=("model.layers.1.self_attn.qkv_proj",))
    assert not ignoring.covers("model.layers.1.self_attn.k_proj")
    assert ignoring.covers("model.layers.0.self_attn.k_proj")
    quantise_checkpoint(fused_source("phi"), RECIPES["w4a16"], tmp_path)
    name = "model.layers.1.self_attn.qkv_proj.weight_scale"
    change_tensors(folder := tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"tensors are missing: 1, the first is '{name}'"):
        load_weights(folder, load_config(folder), dtype=torch.float32, device=CPU)


def test_blocks_without_whole_heads_are_refused_where_heads_are_rotated_in_part(tmp_path: Path) -> None:
    source = fused_source("phi, heads rotated in part")
    quantise_checkpoint(source, recipes(GROUP, 8)["fp8-blocks"], tmp_path)
    with pytest.raises(UnsupportedModelError, match="blocks of 8 outputs have no whole heads of 16"):
        load_config(tmp_path)
