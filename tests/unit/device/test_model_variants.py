"""Variants that config.json can describe, each against transformers: rope scaling, biases, windows, tied weights.

The tests run the decoder alone: a prompt whole, in chunks, and token by token, with NaN in every unwritten block.
Prompts are longer than every window and than the training context of a scaled rope.
"""

import json
import shutil
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.worker.model.config import load_config
from blockyard.worker.model.families.table import FAMILIES
from blockyard.worker.model.rotary_table import rotary_table
from blockyard.worker.model.traits.family import Sizes
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.unit.worker.checkpoints import (
    ARCHITECTURES,
    assert_logits_equal_transformers,
    config_of,
    make_checkpoint,
    reference_logits,
    shared_checkpoint,
)
from tests.unit.worker.steps import DEVICE, NEAR_GAP, Model
from tests.unit.worker.token_engines import greedy, prompt_of

MODES = [{}, {"name": "torch"}, {"deterministic": True}] if DEVICE.type == "cpu" else [{}]
PROMPTS = [prompt_of(75), prompt_of(40, seed=1), prompt_of(9, seed=2)]
NUM_TOKENS = 6
ORIGINAL = 24
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": (
        "LlamaForCausalLM",
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": ORIGINAL}},
    ),
    "linear": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "yarn": ("Qwen2ForCausalLM", {"rope_parameters": YARN}),
    "yarn-mscale": ("LlamaForCausalLM", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
    "yarn-attention-factor": ("Qwen3ForCausalLM", {"rope_parameters": YARN | {"attention_factor": 1.5}}),
    "yarn-ramp": (
        "MistralForCausalLM",
        {"rope_parameters": YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}},
    ),
    "llama-bias": ("LlamaForCausalLM", {"attention_bias": True}),
    "qwen3-bias": ("Qwen3ForCausalLM", {"attention_bias": True}),
    "qwen3-tied": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 16}),
    "mistral-narrowest": ("MistralForCausalLM", {"sliding_window": 1}),
    "mistral-window-yarn-tied": (
        "MistralForCausalLM",
        {"sliding_window": 17, "rope_parameters": YARN, "tie_word_embeddings": True},
    ),
    "qwen2-window": ("Qwen2ForCausalLM", QWEN_WINDOW),
    "qwen3-window": ("Qwen3ForCausalLM", QWEN_WINDOW | {"sliding_window": 40}),
    "qwen3-layer-types": (
        "Qwen3ForCausalLM",
        QWEN_WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "mixtral-window": ("MixtralForCausalLM", {"sliding_window": 16}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 21,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
            "decoder_sparse_step": 2,
        },
    ),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "one-kv-head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "four-kv-heads": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "larger-heads": ("LlamaForCausalLM", {"head_dim": 32}),
    "base": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
}
SAME: dict[str, tuple[str, dict[str, Any]]] = {
    **{architecture: (architecture, {}) for architecture in ARCHITECTURES},
    "qwen2-window-off": ("Qwen2ForCausalLM", QWEN_WINDOW | {"use_sliding_window": False}),
    # Large enough to be packed, or laid out for the CPU's own linears.
    "large": (
        "LlamaForCausalLM",
        {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 320, "head_dim": 64},
    ),
}
"""Models that change no field by which a result changes."""


@pytest.fixture(scope="module", params=VARIANTS | SAME)
def folder(request: pytest.FixtureRequest) -> Path:
    architecture, overrides = (VARIANTS | SAME)[request.param]
    return shared_checkpoint(architecture, **overrides)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_logits_and_tokens_equal_transformers_in_chunks_and_in_company(
    folder: Path, mode: dict[str, Any]
) -> None:
    model = Model(folder, **mode)
    whole_TV = model.logits(PROMPTS[0])
    assert_logits_equal_transformers(whole_TV, folder, list(PROMPTS[0]))
    expected = [greedy(folder, prompt, NUM_TOKENS, NEAR_GAP) for prompt in PROMPTS]
    assert model.generate(PROMPTS, NUM_TOKENS, chunk_tokens=19) == expected
    if "deterministic" in mode:
        others, ends = list(range(20, 25)), [0, 1, 30, 31, 47, 75]
        chunks = [model.step([(PROMPTS[0][:end], start, others)])[0] for start, end in pairwise(ends)]
        assert torch.equal(torch.cat(chunks), whole_TV), "not the same bits in chunks"


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_changes_the_result(variant: str) -> None:
    """A field that no code reads would pass every comparison if it did not change the result."""
    architecture, overrides = VARIANTS[variant]
    changed, plain = (
        reference_logits(shared_checkpoint(architecture, **fields), list(PROMPTS[0]))
        for fields in (overrides, {})
    )
    assert (changed - plain).abs().max() > 20 * NEAR_GAP


ROPE_FORMS: dict[str, dict[str, Any]] = {
    "of-transformers-5": {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
    "of-transformers-4": {"rope_scaling": LLAMA3, "rope_theta": 5e5},
    "both": {
        "rope_scaling": LLAMA3,
        "rope_theta": 5e5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 9.0},
    },
    "old-type": {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 5e5},
    "old-yarn": {"rope_scaling": {"type": "yarn", "factor": 8.0, "finetuned": True}},
    "yarn-without-factor": {"rope_scaling": YARN | {"factor": None}},
    "original-context-outside": {"rope_scaling": YARN, "original_max_position_embeddings": 400},
    "llama3-of-other-bands": {"rope_scaling": LLAMA3 | {"low_freq_factor": 3.0, "high_freq_factor": 9.0}},
    "yarn-over-less-than-a-turn": {"rope_scaling": YARN | {"original_max_position_embeddings": 5}},
    "yarn-half-mscale": {"rope_scaling": YARN | {"mscale": 2.0}},
    "no-base": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "default-with-leftovers": {"rope_scaling": {"rope_type": "default", "factor": 3.0}, "rope_theta": 77.0},
}


@pytest.mark.parametrize("form", ROPE_FORMS)
def test_rotary_tables_equal_transformers_in_every_form_of_the_file(form: str, tmp_path: Path) -> None:
    shutil.copytree(shared_checkpoint("LlamaForCausalLM"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    del fields["rope_parameters"]
    file.write_text(json.dumps(fields | ROPE_FORMS[form]))
    table_MD = rotary_table(load_config(tmp_path))
    rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    cos, sin = rotary(torch.zeros(1), torch.arange(len(table_MD))[None])
    torch.testing.assert_close(table_MD[:, :8], cos[0, :, :8], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(table_MD[:, 8:], sin[0, :, :8], atol=1e-6, rtol=1e-6)


def test_a_model_serves_its_own_longest_context_or_what_yarn_reaches(tmp_path: Path) -> None:
    def longest(**overrides: Any) -> int:
        return load_config(make_checkpoint(tmp_path, "LlamaForCausalLM", **overrides)).max_position_embeddings

    assert longest() == 512
    assert (
        longest(rope_parameters=LLAMA3 | {"rope_theta": 1e4, "original_max_position_embeddings": 64}) == 512
    )
    assert longest(rope_parameters=YARN | {"original_max_position_embeddings": 32}) == 512
    assert longest(rope_parameters=YARN | {"original_max_position_embeddings": 512}) == 4096


FULL, SLIDING = "full_attention", "sliding_attention"
QWEN: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8}
WINDOWS: list[tuple[str, dict[str, Any], tuple[int | None, ...]]] = [
    ("MistralForCausalLM", {"sliding_window": 8}, (8, 8, 8)),
    ("MistralForCausalLM", {"sliding_window": 512}, (None, None, None)),
    ("MistralForCausalLM", {"sliding_window": None}, (None, None, None)),
    ("MistralForCausalLM", {"max_position_embeddings": 9000}, (4096, 4096, 4096)),
    ("LlamaForCausalLM", {}, (None, None, None)),
    ("Qwen2ForCausalLM", QWEN | {"max_window_layers": 2}, (None, None, 8)),
    ("Qwen2ForCausalLM", QWEN, (None, None, None)),
    ("Qwen2ForCausalLM", {"sliding_window": 8, "max_window_layers": 0}, (None, None, None)),
    (
        "Qwen3ForCausalLM",
        QWEN | {"layer_types": [SLIDING, FULL, FULL], "max_window_layers": 0},
        (8, None, None),
    ),
]


@pytest.mark.parametrize(("architecture", "fields", "expected"), WINDOWS)
def test_the_window_of_each_layer_is_read_as_transformers_reads_it(
    architecture: str, fields: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    raw = {"max_position_embeddings": 512} | fields
    longest = raw["max_position_embeddings"]

    def hiding(windows: Iterable[int | None]) -> tuple[int | None, ...]:
        return tuple(None if window is None or window >= longest else window for window in windows)

    sizes = Sizes(num_layers=3, hidden_size=64, head_dim=16, longest_context=longest)
    assert hiding(FAMILIES[architecture].traits(raw, sizes).layer_windows) == expected
    config = config_of(architecture, num_hidden_layers=3, **raw)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [SLIDING if window is not None else FULL] * 3
    assert hiding(window if kind == SLIDING else None for kind in kinds) == expected
