"""Reading a model's folder: every tensor goes to its place, and an unusable model is refused with a clear message."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.worker.model.config import UnsupportedModelError, load_config, resolve_model
from blockyard.worker.model.shards import num_parameters
from blockyard.worker.model.traits.mixture import Mixture
from blockyard.worker.model.weights import ExpertWeights, load_weights, random_weights
from safetensors.torch import load_file

from .checkpoints import ARCHITECTURES, EXPERTS, reference_model, shared_checkpoint
from .spoiling import Tensors, change_config, change_tensors, copy_of

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of its own, to be spoilt."""
    return copy_of(shared_checkpoint("Qwen2ForCausalLM"), tmp_path / "model")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_weights(folder, load_config(folder), dtype=dtype, device=CPU)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tensor_lands_in_its_part_of_the_fused_ones(architecture: str) -> None:
    folder = shared_checkpoint(architecture)
    tensors = load_file(folder / "model.safetensors")
    weights = load(folder)
    dense_layers = EXPERTS.get(architecture, {}).get("mlp_only_layers", [])
    assert torch.equal(weights.lm_head_VH, tensors["lm_head.weight"])
    for index, layer in enumerate(weights.layers):
        part = {name.split(".", 3)[3]: t for name, t in tensors.items() if f".layers.{index}." in name}
        qkv = [part[f"self_attn.{letter}_proj.weight"] for letter in "qkv"]
        assert torch.equal(layer.qkv_QH, torch.cat(qkv))
        assert (layer.experts is None) == (architecture not in EXPERTS or index in dense_layers)
        if layer.experts is None:
            assert torch.equal(
                layer.gate_up_2IH, torch.cat([part[f"mlp.{name}_proj.weight"] for name in ("gate", "up")])
            )
        else:
            assert_experts(layer.experts, part, is_mixtral=architecture == "MixtralForCausalLM")
        assert layer.attention_out_bias_H is None
        assert (layer.qkv_bias_Q is None) == (architecture != "Qwen2ForCausalLM")
        assert (layer.q_norm_D is None) == (not architecture.startswith("Qwen3"))


def assert_experts(experts: ExpertWeights, part: Tensors, *, is_mixtral: bool) -> None:
    block = "block_sparse_moe" if is_mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    gate_EH = part[f"{block}.gate.weight"]
    assert torch.equal(experts.gate_EH[: len(gate_EH)], gate_EH)
    assert len(experts.gate_up_E2IH) == len(experts.down_EHI) == len(gate_EH)
    for index in range(len(gate_EH)):
        one = {name: part[f"{block}.experts.{index}.{name}.weight"] for name in (gate, up, down)}
        assert torch.equal(experts.gate_up_E2IH[index], torch.cat((one[gate], one[up])))
        assert torch.equal(experts.down_EHI[index], one[down])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_as_transformers_counts_them(architecture: str, tied: bool) -> None:
    folder = shared_checkpoint(architecture, tie_word_embeddings=tied)
    assert num_parameters(load_config(folder)) == reference_model(folder).num_parameters()


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_all_four_biases_of_attention_are_loaded(architecture: str) -> None:
    folder = shared_checkpoint(architecture, attention_bias=True)
    tensors, weights = load_file(folder / "model.safetensors"), load(folder)
    for index, layer in enumerate(weights.layers):
        bias = {letter: tensors[f"model.layers.{index}.self_attn.{letter}_proj.bias"] for letter in "qkvo"}
        assert torch.equal(layer.qkv_bias_Q, torch.cat([bias[letter] for letter in "qkv"]))
        assert torch.equal(layer.attention_out_bias_H, bias["o"])
    assert num_parameters(load_config(folder)) == reference_model(folder).num_parameters()


def test_shards_equal_a_single_file(tmp_path: Path) -> None:
    whole = shared_checkpoint("Qwen3ForCausalLM")
    reference_model(whole).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected, actual = load(whole), load(tmp_path)
    assert torch.equal(actual.layers[2].qkv_QH, expected.layers[2].qkv_QH)
    assert torch.equal(actual.embedding_VH, expected.embedding_VH)


def test_tensors_are_converted_to_the_type_asked_for(folder: Path) -> None:
    weights = load(folder, torch.bfloat16)
    assert weights.final_norm_H.dtype == torch.bfloat16
    assert torch.equal(weights.layers[1].down_HI, load(folder).layers[1].down_HI.bfloat16())


def test_frequencies_stored_by_old_exports_are_passed_over(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(folder, lambda t: t.update({name: torch.zeros(8)}))
    load(folder)


BROKEN: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda t: t.pop("model.norm.weight"), "tensors are missing: 1, .*'model.norm.weight'"),
    "unexpected": (
        lambda t: t.update({"model.layers.9.foo": torch.zeros(1)}),
        "model.safetensors: tensor 'model.layers.9.foo' is unexpected in a Qwen2ForCausalLM",
    ),
    "misshapen": (
        lambda t: t.update({"model.norm.weight": torch.zeros(63)}),
        r"model.safetensors: tensor 'model.norm.weight' has shape \(63,\), config.json asks for \(64,\)",
    ),
    "quantised": (
        lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}),
        "tensor 'model.norm.weight' is I8, not F32 or BF16 or F16",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_wrong_tensor_is_named_with_its_file(kind: str, folder: Path) -> None:
    change, message = BROKEN[kind]
    change_tensors(folder, lambda tensors: (change(tensors), None)[1])
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize("architecture", EXPERTS)
def test_stacked_and_missing_experts_are_named(architecture: str, tmp_path: Path) -> None:
    folder = copy_of(shared_checkpoint(architecture), tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    change_tensors(folder, lambda t: t.update({name: torch.zeros(1)}))
    with pytest.raises(ValueError, match=f"tensor '{name}' is unexpected in a {architecture}"):
        load(folder)
    change_tensors(folder, lambda t: [t.pop(key) for key in list(t) if ".experts.1." in key or key == name])
    with pytest.raises(ValueError, match=r"tensors are missing.*'model\.layers\.0\.mlp\.experts\.1"):
        load(folder)


def test_a_damaged_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a readable safetensors file"):
        load(folder)


def test_pickled_weights_are_refused_and_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no model\.safetensors"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(ValueError, match="pickled weights only"):
        load(folder)


@pytest.mark.parametrize("name", ["absent.safetensors", "../model.safetensors"])
def test_an_index_may_only_name_shards_beside_it(name: str, folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent)
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="which is not beside it"):
        load(folder)


def test_random_weights_are_a_function_of_the_seed(folder: Path) -> None:
    config = load_config(folder)
    first, again, other = (random_weights(config, torch.float32, CPU, seed) for seed in (1, 1, 2))
    assert torch.equal(first.layers[2].qkv_QH, again.layers[2].qkv_QH)
    assert not torch.equal(first.layers[2].qkv_QH, other.layers[2].qkv_QH)
    assert not torch.equal(first.layers[0].qkv_QH, first.layers[1].qkv_QH)
    assert bool((first.final_norm_H == 1).all())


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0}
QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}
COUNTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
    ({"architectures": None}, "architectures"),
    ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 8.0}}, "'dynamic'"),
    ({"rope_parameters": None, "rope_scaling": {"type": "longrope", "long_factor": [2.0]}}, "'longrope'"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "['full_attention']"),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [4, 4]}}, "['mrope_section']"),
    ({"rope_parameters": {"rope_type": "linear"}}, "factor=None"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 0.5}}, "factor=0.5"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, "['beta_fast']"),
    ({"rope_parameters": LLAMA3 | {"low_freq_factor": 5.0}}, "high_freq_factor must not be below"),
    ({"rope_parameters": LLAMA3 | {"low_freq_factor": 0}}, "low_freq_factor=0"),
    ({"rope_parameters": YARN | {"factor": 1e300}}, "reaches more than 16777216 positions"),
    ({"rope_parameters": YARN | {"factor": math.nan}}, "factor=nan"),
    ({"rope_parameters": YARN | {"beta_fast": "much"}}, "beta_fast='much'"),
    ({"rope_parameters": YARN | {"attention_factor": -1.0}}, "attention_factor=-1.0"),
    ({"rope_parameters": YARN | {"original_max_position_embeddings": -5}}, "embeddings=-5"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta=0"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan"),
    ({"rms_norm_eps": None}, "rms_norm_eps=None"),
    ({"rope_parameters": LLAMA3 | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ({"rope_scaling": "linear"}, "'linear'"),
    ({"use_sliding_window": True, "max_window_layers": None, "layer_types": None}, "max_window_layers=None"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
    ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window=0"),
    ({"layer_types": ["full_attention"]}, "layer_types=['full_attention']"),
    ({"layer_types": ["full_attention"] * 2 + ["chunked_attention"]}, "'chunked_attention'"),
    ({"layer_types": ["sliding_attention"] * 3}, "give them no window"),
    ({"architectures": ["LlamaForCausalLM"], "sliding_window": 511}, "sliding_window=511"),
    (
        {"architectures": ["LlamaForCausalLM"], "layer_types": ["sliding_attention"] * 3},
        "every layer is full_attention here",
    ),
    ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, "attention_bias=True"),
    ({"num_experts": 8}, "num_experts=8"),
    ({"num_local_experts": 8}, "num_local_experts=8"),
    (QWEN3_MOE, "num_experts_per_tok=None"),
    (QWEN3_MOE | {"num_experts": 0}, "needs one number of experts"),
    (QWEN3_MOE | {"num_local_experts": 9}, "'num_local_experts': 9"),
    (QWEN3_MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
    (QWEN3_MOE | {"num_experts_per_tok": 2}, "moe_intermediate_size=None"),
    (QWEN3_MOE | COUNTS | {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    (QWEN3_MOE | COUNTS | {"mlp_only_layers": "first"}, "mlp_only_layers='first'"),
    (QWEN3_MOE | COUNTS | {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size=64"),
    (QWEN3_MOE | COUNTS | {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
    ({"architectures": ["MixtralForCausalLM"]}, "needs one number of experts"),
    ({"architectures": ["MixtralForCausalLM"], "attention_bias": True}, "this architecture has no biases"),
    ({"mlp_bias": True}, "mlp_bias=True"),
    ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
]


@pytest.mark.parametrize(("fields", "named"), UNSUPPORTED, ids=[named for _, named in UNSUPPORTED])
def test_what_cannot_be_served_is_refused_by_field_and_value(
    fields: dict[str, Any], named: str, folder: Path
) -> None:
    change_config(folder, **fields)
    with pytest.raises(UnsupportedModelError) as refusal:
        load_config(folder)
    assert named in str(refusal.value)


def test_sparse_layers_and_weights_of_experts_are_those_that_the_config_names(folder: Path) -> None:
    def mixture(**fields: Any) -> Mixture:
        change_config(folder, **(QWEN3_MOE | COUNTS | fields))
        found = load_config(folder).mixture
        assert found is not None
        return found

    assert (mixture().sparse_layers, mixture().normalizes) == ({0, 1, 2}, False)
    assert mixture(decoder_sparse_step=2).sparse_layers == {1}
    assert mixture(decoder_sparse_step=1, mlp_only_layers=[0, 2]).sparse_layers == {1}
    assert mixture(norm_topk_prob=True).normalizes
    mixtral = mixture(architectures=["MixtralForCausalLM"], moe_intermediate_size=None, norm_topk_prob=False)
    assert (mixtral.intermediate_size, mixtral.normalizes) == (112, True)


@pytest.mark.parametrize("fields", [{"hidden_size": None}, {"vocab_size": "many"}, {"num_hidden_layers": 0}])
def test_a_nonsensical_size_is_refused_by_name(fields: dict[str, Any], folder: Path) -> None:
    change_config(folder, **fields)
    with pytest.raises(ValueError, match=next(iter(fields))):
        load_config(folder)


def test_the_rotary_base_is_read_where_either_transformers_writes_it(folder: Path) -> None:
    change_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert load_config(folder).rope_theta == 5e5
    change_config(folder, rope_parameters=None, rope_scaling=None, rope_theta=1e6)
    assert load_config(folder).rope_theta == 1e6


def test_end_tokens_come_from_both_configs(folder: Path) -> None:
    change_config(folder, eos_token_id=5)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert load_config(folder).eos_token_ids == {5, 7, 8}
    (folder / "generation_config.json").unlink()
    assert load_config(folder).eos_token_ids == {5}
    change_config(folder, eos_token_id=[5, 272, -1])
    assert load_config(folder).eos_token_ids == {5}, "ids beyond the logits end nothing"


def test_a_folder_that_is_no_model_is_named(tmp_path: Path, folder: Path) -> None:
    for missing in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match=r"is no model folder: it has no config\.json"):
            load_config(missing)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        load_config(tmp_path)
    assert resolve_model(str(folder)) == folder
    with pytest.raises(ValueError, match="is no folder here"):
        resolve_model(tmp_path / "not" / "there")
