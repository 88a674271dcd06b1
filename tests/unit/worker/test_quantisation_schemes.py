"""Schemes of quantised checkpoints: which are read, what is refused by name, and the fingerprint that carries them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.proto.naming.fingerprint import model_fingerprint
from blockyard.worker.model.config import UnsupportedModelError, load_config
from blockyard.worker.model.division import divide
from blockyard.worker.model.quantisation.scheme import read_scheme
from blockyard.worker.model.shards import weights_bytes
from blockyard.worker.model.weights import load_weights, random_weights

from bench.quantise.recipes import Recipe, gptq

from .checkpoints import shared_checkpoint
from .test_quantised_checkpoints import (
    CPU,
    GROUP,
    RECIPES,
    SIZES,
    change_scheme,
    change_tensors,
    checkpoints,
    write,
)

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
    (tmp_path / "config.json").write_text(
        (shared_checkpoint("Qwen2ForCausalLM", **SIZES) / "config.json").read_text()
    )
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = recipe.config | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError) as refusal:
        load_config(tmp_path)
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
    folder = write(tmp_path, RECIPES["w4a16"])
    for fields, named in (
        ({"ignore": ["lm_head", "model.layers.0.self_attn.k_proj"]}, "k_proj is not quantised"),
        ({"ignore": []}, "'lm_head.weight' is unexpected in a Qwen3ForCausalLM in pack-quantized-4bit-g16"),
    ):
        change_scheme(folder, **fields)
        with pytest.raises(ValueError, match=named):
            load_weights(folder, load_config(folder), dtype=torch.float32, device=CPU)
    config = json.loads((folder / "config.json").read_text())
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    weights["group_size"] = 24
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="multiples of 1 and 24"):
        weights_bytes(load_config(folder), 2, on_cpu=True)


def test_a_cut_within_a_group_or_an_order_is_refused() -> None:
    config = load_config(checkpoints("gptq-4-order")[0])
    with pytest.raises(ValueError, match=r"o_proj has its columns in act order, which 2 ranks cannot share"):
        divide(config, 0, 2)
    for name in ("w4a16", "fp8-blocks"):
        folder, _ = checkpoints(name)
        with pytest.raises(ValueError, match="cannot share in whole runs of 16"):
            divide(with_intermediate(load_config(folder), 80), 0, 2)


def with_intermediate(config: Any, size: int) -> Any:
    return replace(config, intermediate_size=size)


def test_columns_that_do_not_fill_their_groups_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, gptq(4, GROUP, act_order=True))
    name = "model.layers.1.mlp.down_proj.g_idx"
    change_tensors(folder, lambda tensors: tensors[name].zero_())
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj: g_idx does not give"):
        load_weights(folder, load_config(folder), dtype=torch.float32, device=CPU)


def test_a_bias_that_the_model_does_not_have_must_be_zero(tmp_path: Path) -> None:
    folder = write(tmp_path, GPTQ_4)
    load_weights(folder, load_config(folder), dtype=torch.float32, device=CPU)
    change_tensors(folder, lambda tensors: tensors["model.layers.1.self_attn.o_proj.bias"].fill_(1))
    with pytest.raises(ValueError, match="is not zero"):
        load_weights(folder, load_config(folder), dtype=torch.float32, device=CPU)


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
