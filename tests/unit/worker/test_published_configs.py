"""Files config.json of published models, read as transformers reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.worker.model.config import ModelConfig, load_config
from blockyard.worker.model.rotary_table import query_scales, rotary_table
from transformers import AutoConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextRotaryEmbedding
from transformers.models.ministral3.modeling_ministral3 import (
    Ministral3RotaryEmbedding,
    get_llama_4_attn_scale,
)
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

FULL, SLIDING = "full_attention", "sliding_attention"
FILES = {
    "google/gemma-3-1b-it": """
{"architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attn_logit_softcapping": null,
"eos_token_id": [1, 106], "final_logit_softcapping": null, "head_dim": 256,
"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
"max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
"num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
"rope_local_base_freq": 10000, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512,
"sliding_window_pattern": 6, "torch_dtype": "bfloat16", "vocab_size": 262144}
""",
    "google/gemma-3-4b-it": """
{"architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
"eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144,
"initializer_range": 0.02, "mm_tokens_per_image": 256, "model_type": "gemma3",
"text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
"sliding_window": 1024}, "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152,
"image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
"num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": false}}
""",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": """
{"architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080,
"eoi_token_index": 200081, "image_token_index": 200092, "model_type": "llama4",
"text_config": {"attention_bias": false, "attention_chunk_size": 8192, "attention_dropout": 0.0,
"bos_token_id": 200000, "eos_token_id": [200001, 200007, 200008], "for_llm_compressor": false,
"head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "interleave_moe_layer_step": 1,
"intermediate_size": 8192, "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760,
"model_type": "llama4_text", "no_rope_layers": [], "num_attention_heads": 40, "num_experts_per_tok": 1,
"num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16, "rms_norm_eps": 1e-05,
"rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
"original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
"use_qk_norm": true, "vocab_size": 202048}, "torch_dtype": "bfloat16",
"vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model"}}
""",
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": """
{"architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10,
"model_type": "mistral3", "multimodal_projector_bias": false, "projector_hidden_act": "gelu",
"spatial_merge_size": 2, "text_config": {"attention_dropout": 0.0, "head_dim": 128,
"hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 32768,
"max_position_embeddings": 131072, "model_type": "mistral", "num_attention_heads": 32,
"num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0,
"sliding_window": null, "vocab_size": 131072}, "torch_dtype": "bfloat16",
"vision_config": {"hidden_size": 1024, "model_type": "pixtral"}, "vision_feature_layer": -1}
""",
    "mistralai/Ministral-3-8B-Instruct-2512": """
{"architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16", "image_token_index": 10,
"model_type": "mistral3", "quantization_config": {"activation_scheme": "static", "dequantize": false,
"modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
"quant_method": "fp8", "weight_block_size": null}, "text_config": {"attention_dropout": 0.0,
"head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
"max_position_embeddings": 262144, "model_type": "ministral3", "num_attention_heads": 32,
"num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
"rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
"rope_theta": 1000000.0, "rope_type": "yarn", "type": "yarn"}, "sliding_window": null,
"tie_word_embeddings": false, "vocab_size": 131072}, "vision_config": {"hidden_size": 1024,
"model_type": "pixtral"}}
""",
    "microsoft/Phi-4-mini-instruct": """
{"architectures": ["Phi3ForCausalLM"], "attention_bias": false, "bos_token_id": 199999,
"eos_token_id": 199999, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
"max_position_embeddings": 131072, "model_type": "phi3", "num_attention_heads": 24,
"num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
"pad_token_id": 199999, "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-05,
"rope_scaling": {"type": "longrope"}, "rope_theta": 10000.0, "sliding_window": 262144,
"tie_word_embeddings": true, "torch_dtype": "bfloat16", "vocab_size": 200064}
""",
}
"""Files as earlier versions of transformers wrote them."""
PUBLISHED: dict[str, dict[str, Any]] = {name: json.loads(text) for name, text in FILES.items()}
PUBLISHED["microsoft/Phi-4-mini-instruct"]["rope_scaling"] |= {
    "long_factor": [1.0 + index / 2 for index in range(48)],
    "short_factor": [1.0 + index / 90 for index in range(48)],
}
"""The factors of longrope are made up."""


def read(fields: dict[str, Any], folder: Path) -> tuple[ModelConfig, Any]:
    """Return what we and transformers read from a file of these fields."""
    (folder / "config.json").write_text(json.dumps(fields))
    return load_config(folder), AutoConfig.from_pretrained(folder).get_text_config()


@pytest.mark.parametrize("name", ["google/gemma-3-1b-it", "google/gemma-3-4b-it"])
def test_gemmas_older_file_is_read_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    ours, theirs = read(PUBLISHED[name], tmp_path)
    assert_sizes_equal(ours, theirs)
    windows = [theirs.sliding_window if kind == SLIDING else None for kind in theirs.layer_types]
    assert list(ours.layer_windows) == windows
    ropes = theirs.rope_parameters
    local = [ropes[SLIDING]["rope_theta"] if kind == SLIDING else None for kind in theirs.layer_types]
    assert list(ours.layer_rope_thetas) == local
    assert ours.rope_theta == ropes[FULL]["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.attention_scale == theirs.query_pre_attn_scalar**-0.5


def test_mistral_3s_older_file_is_read_as_its_checkpoint_needs_it(tmp_path: Path) -> None:
    """Its head is stored, and its file does not say whether it is tied. Transformers 4 and 5 take that differently."""
    ours, theirs = read(PUBLISHED["mistralai/Mistral-Small-3.1-24B-Instruct-2503"], tmp_path)
    assert_sizes_equal(ours, theirs)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.layer_windows == (None,) * 40
    assert not ours.tie_word_embeddings


def test_ministral_3s_file_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    fields = PUBLISHED["mistralai/Ministral-3-8B-Instruct-2512"]
    ours, theirs = read(fields, tmp_path)
    assert_sizes_equal(ours, theirs)
    assert str(ours.quantisation) == "fp8-8bit"
    assert ours.layer_windows == (None,) * 34
    assert ours.max_position_embeddings == 262_144
    positions = torch.arange(40_000)
    cos, sin = Ministral3RotaryEmbedding(theirs)(torch.zeros(1), positions[None])
    theirs_MD = torch.cat((cos[0, :, :64], sin[0, :, :64]), dim=1)
    torch.testing.assert_close(rotary_table(ours)[:40_000], theirs_MD, atol=1e-6, rtol=1e-6)
    assert ours.query_scaling is not None
    their_scales = get_llama_4_attn_scale(positions[None], 0.1, 16_384).flatten()
    torch.testing.assert_close(query_scales(ours.query_scaling, 40_000), their_scales)


@pytest.mark.parametrize("factors", [{}, {"factor": 16.0, "high_freq_factor": 1.0}])
def test_llama_4s_file_is_read_as_transformers_reads_it(factors: dict[str, float], tmp_path: Path) -> None:
    """Later files have other factors, of which two are equal."""
    fields = PUBLISHED["meta-llama/Llama-4-Scout-17B-16E-Instruct"]
    scaling = fields["text_config"]["rope_scaling"] | factors
    text = fields["text_config"] | {"rope_scaling": scaling}
    ours, theirs = read(fields | {"text_config": text}, tmp_path)
    assert_sizes_equal(ours, theirs, but_for="intermediate_size")
    assert ours.intermediate_size == theirs.intermediate_size_mlp
    assert ours.mixture is not None
    assert ours.mixture.intermediate_size == ours.mixture.shared_rows == theirs.intermediate_size
    assert sorted(ours.mixture.sparse_layers) == theirs.moe_layers
    assert list(ours.rotated_layers) == [bool(turns) for turns in theirs.no_rope_layers]
    assert ours.max_position_embeddings == 8192
    table_MD = rotary_table(ours)
    turned = Llama4TextRotaryEmbedding(theirs)(torch.zeros(1), torch.arange(8192)[None])[0]
    theirs_MD = torch.cat((turned.real, turned.imag), dim=1)
    torch.testing.assert_close(table_MD, theirs_MD, atol=1e-6, rtol=1e-6)


def assert_sizes_equal(ours: ModelConfig, theirs: Any, *, but_for: str = "") -> None:
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    sizes = {"hidden_size", "head_dim", "intermediate_size", "vocab_size", "rms_norm_eps"} - {but_for}
    for name in sizes:
        assert getattr(ours, name) == getattr(theirs, name), name


def test_phis_older_file_gives_the_rotary_table_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["microsoft/Phi-4-mini-instruct"]))
    config = load_config(tmp_path)
    assert (config.max_position_embeddings, config.rotary_dim) == (4096, 96)
    assert config.layer_windows == (None,) * 32
    table_MD = rotary_table(config)
    rotary = Phi3RotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    cos, sin = rotary(torch.zeros(1), torch.arange(4096)[None])
    staying = torch.ones(4096, 16)
    theirs_MD = torch.cat((cos[0, :, :48], staying, sin[0, :, :48], 0 * staying), dim=1)
    torch.testing.assert_close(table_MD, theirs_MD, atol=1e-6, rtol=1e-6)


WITH_IMAGES = [name for name, fields in PUBLISHED.items() if "text_config" in fields]


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_a_size_that_a_text_part_lacks_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """Version 4 of it writes no size that equals its own default."""
    fields = PUBLISHED[name]
    dropped = {"head_dim", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"}
    dropped |= {"num_key_value_heads", "rms_norm_eps", "vocab_size", "max_position_embeddings"}
    for key in dropped & fields["text_config"].keys():
        text = {kept: value for kept, value in fields["text_config"].items() if kept != key}
        ours, theirs = read(fields | {"text_config": text}, tmp_path)
        assert_sizes_equal(ours, theirs, but_for="intermediate_size" if "lama-4" in name else "")


def test_fields_that_a_file_lacks_or_has_elsewhere_mean_the_same(tmp_path: Path) -> None:
    ministral = PUBLISHED["mistralai/Ministral-3-8B-Instruct-2512"]
    text = ministral["text_config"]
    whole, _ = read(ministral, tmp_path)
    without_rope = {key: value for key, value in text.items() if key != "rope_parameters"}
    assert read(ministral | {"text_config": without_rope}, tmp_path)[0] == whole
    tied = ministral | {"text_config": text | {"tie_word_embeddings": True}}
    assert read(tied, tmp_path)[0].tie_word_embeddings
    assert not read(tied | {"tie_word_embeddings": False}, tmp_path)[0].tie_word_embeddings, (
        "the top level wins"
    )
    mistral = PUBLISHED["mistralai/Mistral-Small-3.1-24B-Instruct-2503"]
    without_kind = {key: value for key, value in mistral["text_config"].items() if key != "model_type"}
    (tmp_path / "config.json").write_text(json.dumps(mistral | {"text_config": without_kind}))
    assert load_config(tmp_path).num_kv_heads == 8


def test_a_file_that_transformers_wrote_anew_means_the_same(tmp_path: Path) -> None:
    """It has the special tokens at the top level and others in the text part."""
    before, _ = read(PUBLISHED["google/gemma-3-4b-it"], tmp_path)
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "anew")
    assert before.eos_token_ids == load_config(tmp_path / "anew").eos_token_ids == {1, 106}
