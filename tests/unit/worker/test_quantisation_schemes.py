"""Schemes of quantised checkpoints: which are read, what is refused by name, and the fingerprint that carries them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.proto.naming.fingerprint import model_fingerprint
from blockyard.worker.model.config import UnsupportedModelError, load_config
from blockyard.worker.model.quantisation.scheme import read_scheme
from blockyard.worker.model.shards import weights_bytes
from blockyard.worker.model.weights import random_weights

from bench.quantise.recipes import Recipe, gptq

from .checkpoints import shared_checkpoint
from .quantised import CPU, GROUP, RECIPES, checkpoints, load, pair, source_of
from .spoiling import change_config, change_scheme, change_tensors, copy_of, read_config

GPTQ_4 = gptq(4, GROUP)
UNSUPPORTED: list[tuple[Recipe, dict[str, Any], str]] = [
    (GPTQ_4, {"quant_method": "quip"}, "quant_method='quip'"),
    (GPTQ_4, {"bits": 3}, "bits=3"),
    (GPTQ_4, {"dynamic": {"-:.*down.*": {}}}, "dynamic="),
    (GPTQ_4, {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
    (GPTQ_4, {"format": "bitblas"}, "format='bitblas'"),
    (GPTQ_4, {"group_size": 0}, "group_size=0"),
    (GPTQ_4, {"group_size": True}, "group_size=True"),
    (RECIPES["awq"], {"version": "gemv"}, "version='gemv'"),
    (RECIPES["awq"], {"zero_point": False}, "zero_point=False"),
    (RECIPES["awq"], {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert='lm_head'"),
    (RECIPES["fp8-blocks"], {"fmt": "e5m2"}, "fmt='e5m2'"),
    (RECIPES["fp8-blocks"], {"weight_block_size": [128]}, "weight_block_size=[128]"),
    (RECIPES["w4a16"], {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
    (RECIPES["w4a16"], {"config_groups": {}}, "config_groups=[]"),
    (RECIPES["w4a16"], {"config_groups": {"group_0": 4}}, "group_0=4"),
    (
        RECIPES["w4a16"],
        {"config_groups": {"group_0": {"targets": ["Linear"], "weights": [4]}}},
        "weights=[4]",
    ),
    (RECIPES["w4a16"], {"sparsity_config": "dense"}, "sparsity_config='dense'"),
    (RECIPES["w4a16"], {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    (RECIPES["w4a16"], {"ignore": ["re:("]}, "'re:('"),
    (RECIPES["w4a16"], {"transform_config": {"config_groups": {"u": {}}}}, "transform_config="),
]


@pytest.mark.parametrize(
    ("recipe", "fields", "named"), UNSUPPORTED, ids=[named for _, _, named in UNSUPPORTED]
)
def test_what_is_unknown_is_refused_by_name(
    recipe: Recipe, fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = copy_of(shared_checkpoint("Qwen2ForCausalLM"), tmp_path)
    change_config(folder, quantization_config=recipe.config | fields)
    with pytest.raises(UnsupportedModelError) as refusal:
        load_config(folder)
    assert named in str(refusal.value)


REAL: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-FP8": (
        "fp8-8bit-b128",
        {
            "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
            "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        },
    ),
    "Qwen2.5-GPTQ-Int4": (
        "gptq-4bit-g128",
        {
            "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True, "tokenizer": None,
            "damp_percent": 0.01, "dataset": None, "desc_act": False, "exllama_config": {"version": 1}, "sym": True,
            "group_size": 128, "max_input_length": None, "model_seqlen": None, "quant_method": "gptq",
            "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None, "pad_token_id": None,
            "true_sequential": True, "use_cuda_fp16": False, "use_exllama": True,
        },
    ),
    "Qwen2.5-AWQ": (
        "awq-4bit-g128",
        {
            "bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
            "zero_point": True,
        },
    ),
    "FP8-block by llm-compressor": (
        "float-quantized-8bit-b128",
        {
            "config_groups": {
                "group_0": {
                    "format": "float-quantized", "targets": ["Linear"], "output_activations": None,
                    "input_activations": {"dynamic": True, "num_bits": 8, "strategy": "group", "group_size": 128},
                    "weights": {
                        "actorder": None, "block_structure": "128x128", "dynamic": False, "group_size": None,
                        "num_bits": 8, "observer": "static_minmax", "observer_kwargs": {}, "scale_dtype": None,
                        "strategy": "block", "symmetric": True, "type": "float", "zp_dtype": None,
                    },
                }
            },
            "format": "float-quantized", "global_compression_ratio": None, "ignore": ["lm_head"],
            "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
            "sparsity_config": {}, "transform_config": {}, "version": "0.12.2",
        },
    ),
}  # fmt: skip
"""The `quantization_config` of published checkpoints, and the scheme's name."""


@pytest.mark.parametrize("name", REAL)
def test_the_configs_of_published_checkpoints_are_read(name: str) -> None:
    scheme, given = REAL[name]
    assert str(read_scheme({"quantization_config": given})) == scheme


def test_shapes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder, _ = pair(tmp_path, source_of("Qwen3ForCausalLM"), "w4a16")
    for ignore, named in (
        (["lm_head", "model.layers.0.self_attn.k_proj"], "k_proj is not quantised"),
        ([], "'lm_head.weight' is unexpected in a Qwen3ForCausalLM in pack-quantized-4bit-g16"),
    ):
        with pytest.raises(ValueError, match=named):
            load(change_scheme(folder, ignore=ignore))
    groups = read_config(folder)["quantization_config"]["config_groups"]
    groups["group_0"]["weights"]["group_size"] = 24
    with pytest.raises(UnsupportedModelError, match="multiples of 1 and 24"):
        weights_bytes(load_config(change_scheme(folder, config_groups=groups)), 2, on_cpu=True)


def test_columns_that_do_not_fill_their_groups_are_refused(tmp_path: Path) -> None:
    folder, _ = pair(tmp_path, source_of("Qwen3ForCausalLM"), gptq(4, GROUP, act_order=True))
    name = "model.layers.1.mlp.down_proj.g_idx"
    change_tensors(folder, lambda tensors: tensors[name].zero_())
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj: g_idx does not give"):
        load(folder)


def test_a_bias_that_the_model_does_not_have_must_be_zero(tmp_path: Path) -> None:
    folder, _ = pair(tmp_path, source_of("Qwen3ForCausalLM"), GPTQ_4)
    load(folder)
    change_tensors(folder, lambda tensors: tensors["model.layers.1.self_attn.o_proj.bias"].fill_(1))
    with pytest.raises(ValueError, match="is not zero"):
        load(folder)


def test_random_weights_are_not_quantised() -> None:
    with pytest.raises(ValueError, match="random weights are not quantised"):
        random_weights(load_config(checkpoints("awq")[0]), torch.float32, CPU, 0)


def test_the_fingerprint_carries_the_scheme() -> None:
    """The names of blocks begin with it. A scheme is a part of config.json, all of which counts."""
    fingerprints = {
        model_fingerprint(folder, load_format="auto", seed=0, dtype="torch:float32")
        for name in ("w4a16", "w4a16-asymmetric", "w8a16")
        for folder in checkpoints(name)
    }
    assert len(fingerprints) == 6
