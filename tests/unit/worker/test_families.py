"""Families whose layers are near Llama's, each against transformers: on every backend, in chunks, divided, recorded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.worker.execution.part_runner import PartRunner
from blockyard.worker.model.config import UnsupportedModelError, load_config
from blockyard.worker.model.division import divide
from blockyard.worker.model.families import llama
from blockyard.worker.model.families.table import FAMILIES
from blockyard.worker.model.shards import check_shards
from blockyard.worker.model.traits.family import Family, allows
from blockyard.worker.parallel.follower import Follower
from safetensors.torch import load_file, save_file

from .checkpoints import assert_logits_equal_transformers, reference_logits, shared_checkpoint
from .ranks import divided_engine
from .recording import assert_records_and_generates
from .spoiling import change_config, copy_of
from .steps import NEAR_GAP, Model
from .token_engines import assert_greedy, config_of, greedy, outputs_of, prompt_of, run, submit

NUM_TOKENS = 6
PROMPTS = [prompt_of(75), prompt_of(40, seed=1), prompt_of(9, seed=2)]
YARN = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4, "original_max_position_embeddings": 24}
FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA3: dict[str, Any] = {
    "sliding_window": 20,
    "layer_types": [SLIDING, FULL, SLIDING],
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    },
}
OLMO3: dict[str, Any] = {
    "sliding_window": 20,
    "layer_types": [SLIDING, FULL, SLIDING],
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: YARN,
    },
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.22,
    "logits_scaling": 2.5,
}
PART = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
LONG = PART | {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
    "long_factor": [3.0] * 6,
}
LLAMA4: dict[str, Any] = {
    "attention_chunk_size": 512,
    "attn_scale": 0.4,
    "floor_scale": 8,
    "interleave_moe_layer_step": 2,
    "intermediate_size": 48,
    "intermediate_size_mlp": 112,
    "no_rope_layers": [1, 0, 1],
    "num_local_experts": 4,
}
SCALED = YARN | {"factor": 32.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5}
MINISTRAL3 = {"rope_parameters": SCALED}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3ForCausalLM", GEMMA3 | {"tie_word_embeddings": True}),
    "gemma3-images": ("Gemma3ForConditionalGeneration", GEMMA3 | {"tie_word_embeddings": True}),
    "granite": ("GraniteForCausalLM", GRANITE | {"attention_bias": True}),
    "llama4": ("Llama4ForCausalLM", LLAMA4),
    "llama4-images": ("Llama4ForConditionalGeneration", LLAMA4),
    "ministral3": ("Ministral3ForCausalLM", MINISTRAL3),
    "ministral3-images": (
        "Mistral3ForConditionalGeneration",
        MINISTRAL3 | {"model_type": "ministral3", "tie_word_embeddings": True},
    ),
    "mistral3": ("Mistral3ForConditionalGeneration", {"model_type": "mistral", "sliding_window": 20}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", OLMO3),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 20, "rope_parameters": PART}),
    "phi3-longrope": (
        "Phi3ForCausalLM",
        {"rope_parameters": LONG, "original_max_position_embeddings": 128},
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest) -> Path:
    architecture, overrides = MODELS[request.param]
    return shared_checkpoint(architecture, **overrides)


@pytest.mark.parametrize("mode", [{"name": "torch"}, {"name": "cpu"}, {"deterministic": True}], ids=str)
def test_logits_and_tokens_equal_transformers(folder: Path, mode: dict[str, Any]) -> None:
    model = Model(folder, **mode)
    assert_logits_equal_transformers(model.logits(PROMPTS[0]), folder, list(PROMPTS[0]))
    expected = [greedy(folder, prompt, NUM_TOKENS, NEAR_GAP) for prompt in PROMPTS]
    assert model.generate(PROMPTS, NUM_TOKENS, chunk_tokens=19) == expected


@pytest.mark.parametrize("folder", ["olmo2", "gemma3", "llama4"], indirect=True)
def test_an_mlp_in_pieces_leaves_the_residual_alone(folder: Path) -> None:
    """A prompt is longer than what the C++ backend takes through an MLP at once."""
    model = Model(folder, name="cpu")
    assert model.backend.mlp_rows is not None
    tokens = prompt_of(model.backend.mlp_rows + 9)
    assert_logits_equal_transformers(model.logits(tokens), folder, list(tokens))


@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_bfloat16_is_as_near_to_fp32_as_that_of_transformers(folder: Path, name: Any) -> None:
    """A norm that rounds twice instead of once, or a factor in another place, would show."""
    exact, rounded = (
        reference_logits(folder, list(PROMPTS[0]), dtype).float() for dtype in (torch.float32, torch.bfloat16)
    )
    ours = Model(folder, name=name, dtype=torch.bfloat16).logits(PROMPTS[0]).float() - exact
    assert ours.square().mean() < 1.5 * (rounded - exact).square().mean()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_engine_reuses_prefixes_and_divides_what_can_be_divided(folder: Path, num_ranks: int) -> None:
    """Tables of positions end with the context that is served."""
    if num_ranks > 1 and load_config(folder).whole_qk_norm:
        with pytest.raises(ValueError, match=r"Olmo\dForCausalLM is not divided among ranks"):
            divide(load_config(folder), 0, 2)
        return
    followers: list[Follower] = []
    budgets = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "max_model_len": 67, "overlap_steps": "on"}
    with divided_engine(config_of(folder, **budgets), num_ranks, followers) as engine:
        for part in [engine.runner, *(follower._part for follower in followers)]:
            assert isinstance(part, PartRunner)
            tables = [*part._decoder._rotary_tables, part._decoder._query_scale_M]
            assert {len(table) for table in tables if table is not None} == {67}
        first = submit(engine, prompt_of(50), 8)
        assert_greedy(folder, prompt_of(50), run(engine)[first][0])
        longer = prompt_of(50) + prompt_of(9)
        again = submit(engine, longer, 67 - len(longer))
        tokens, num_cached = run(engine)[again]
        assert num_cached == 48
        assert_greedy(folder, longer, tokens)


def test_linears_in_int8_stay_near_fp32(folder: Path) -> None:
    with divided_engine(config_of(folder, dtype="float32", cpu_linears="int8"), 1) as engine:
        submit(engine, prompt_of(37), 1, logprobs=1)
        [[output]] = outputs_of(engine).values()
    exact = reference_logits(folder, list(prompt_of(37)))[-1].log_softmax(-1)
    assert output.logprobs[0].logprob == pytest.approx(float(exact[output.token_ids[0]]), abs=0.3)


@pytest.mark.parametrize("folder", ["granite", "olmo2", "phi3-longrope"], indirect=True)
def test_decode_steps_are_recorded_where_no_layer_has_a_window(folder: Path) -> None:
    assert_records_and_generates(folder)


@pytest.mark.parametrize(
    ("folder", "changes"),
    [
        ("gemma3", {"query_pre_attn_scalar": 16}),
        ("gemma3", {"sliding_window": 512}),
        ("gemma3", {"rope_parameters": None}),
        (
            "ministral3",
            {"rope_parameters": SCALED | {"original_max_position_embeddings": 32, "factor": 16.0}},
        ),
        ("olmo3", {"layer_types": [FULL] * 3}),
        ("olmo3", {"rope_parameters": OLMO3["rope_parameters"] | {FULL: {"rope_theta": 1e4}}}),
        *(("granite", {key: 1.0}) for key in GRANITE),
        ("llama4", {"no_rope_layers": [1, 1, 1], "layer_types": None}),
        ("llama4", {"use_qk_norm": False}),
        ("llama4", {"attention_chunk_size": 32}),
        ("llama4", {"floor_scale": 8192}),
        ("llama4", {"attn_temperature_tuning": False}),
        ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("phi3-longrope", {"rope_parameters": LONG | {"short_factor": [1.0] * 6}}),
        ("phi3-longrope", {"rope_parameters": LONG | {"attention_factor": 1.0}}),
    ],
    indirect=["folder"],
)
def test_every_field_changes_the_result(folder: Path, changes: dict[str, Any], tmp_path: Path) -> None:
    """A field that no code reads would pass every comparison if it did not change the result."""
    changed = change_config(copy_of(folder, tmp_path), **changes)
    change = reference_logits(changed, list(PROMPTS[0])) - reference_logits(folder, list(PROMPTS[0]))
    assert change.abs().max() > 20 * NEAR_GAP


@pytest.mark.parametrize(
    ("folder", "changes", "named"),
    [
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern=0"),
        (
            "gemma3",
            {"rope_parameters": {SLIDING: {"rope_type": "linear", "factor": 2.0}, FULL: {}}},
            "layers with a window scale no rope",
        ),
        ("granite", {"logits_scaling": 0}, "logits_scaling=0"),
        ("granite", {"residual_multiplier": "much"}, "residual_multiplier='much'"),
        ("granite", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama4", {"num_experts_per_tok": 2}, "num_experts_per_tok=2"),
        ("llama4", {"no_rope_layers": [1, 0]}, "no_rope_layers=[1, 0]"),
        ("llama4", {"moe_layers": [1, 3]}, "moe_layers=[1, 3]"),
        ("llama4", {"layer_types": [FULL] * 3}, f"layer_types={[FULL] * 3}"),
        ("llama4", {"attention_chunk_size": 0}, "attention_chunk_size=0"),
        ("llama4", {"floor_scale": 0}, "floor_scale=0"),
        (
            "ministral3",
            {"rope_parameters": SCALED | {"llama_4_scaling_beta": "much"}},
            "llama_4_scaling_beta='much'",
        ),
        ("mistral3", {"text_config": {"model_type": "qwen2"}}, "model_type='qwen2' of text_config"),
        ("mistral3", {"text_config": None}, "model_type=None of text_config"),
        ("mistral3", {"architectures": ["MistralForCausalLM"]}, "model_type='mistral' of text_config"),
        (
            "llama4",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [24, 24]}},
            "blocks of 24 outputs have no whole heads of 16, whose dimensions a Llama4ForCausalLM reorders",
        ),
        ("olmo2", {"sliding_window": 20}, "sliding_window=20"),
        ("phi3", {"attention_bias": True}, "attention_bias=True"),
        ("phi3", {"rope_parameters": PART | {"partial_rotary_factor": 0.01}}, "partial_rotary_factor=0.01"),
        ("phi3-longrope", {"rope_parameters": LONG | {"short_factor": [1.0]}}, "short_factor=[1.0]"),
    ],
    indirect=["folder"],
)
def test_what_a_family_cannot_compute_is_refused_by_field_and_value(
    folder: Path, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    changed = change_config(copy_of(folder, tmp_path), **changes)
    with pytest.raises(UnsupportedModelError) as refusal:
        load_config(changed)
    assert named in str(refusal.value)


@pytest.mark.parametrize("folder", ["phi3", "gemma3"], indirect=True)
def test_a_missing_or_misshapen_tensor_is_named_as_in_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    copy_of(folder, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    fused = {"Phi3": "self_attn.qkv_proj", "Gemma3": "post_feedforward_layernorm"}
    [module] = [name for family, name in fused.items() if family in load_config(folder).architecture]
    stored = f"model.layers.1.{module}.weight"
    tensor = tensors.pop(stored)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=f"tensors are missing: 1, the first is '{stored}'"):
        check_shards(tmp_path, load_config(tmp_path))
    save_file(tensors | {stored: tensor[:-1].contiguous()}, file)
    with pytest.raises(ValueError, match=f"'{stored}' has shape"):
        check_shards(tmp_path, load_config(tmp_path))


@pytest.mark.parametrize("folder", ["gemma3-images", "mistral3"], indirect=True)
def test_a_text_part_is_found_under_its_newer_names_too(folder: Path, tmp_path: Path) -> None:
    """Transformers 5 has these names in memory, and some checkpoints too. It writes the older ones."""
    copy_of(folder, tmp_path)
    newer = {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    }
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        [head] = [head for head in newer if name.startswith(head)]
        tensors[newer[head] + name.removeprefix(head)] = tensor
    assert any("vision_tower" in name for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    actual, expected = (Model(each, name="torch").logits(PROMPTS[0]) for each in (tmp_path, folder))
    assert torch.equal(actual, expected)


def test_a_model_is_served_up_to_the_end_of_its_first_chunk_or_its_original_context(tmp_path: Path) -> None:
    for name, expected in (("phi3-longrope", 128), ("llama4", 512)):
        architecture, overrides = MODELS[name]
        assert load_config(shared_checkpoint(architecture, **overrides)).max_position_embeddings == expected
    folder = copy_of(shared_checkpoint("Llama4ForCausalLM", **LLAMA4), tmp_path)
    assert load_config(change_config(folder, attention_chunk_size=None)).max_position_embeddings == 512
    assert load_config(change_config(folder, attention_chunk_size=40)).max_position_embeddings == 40
    actual = Model(folder, name="torch").logits(prompt_of(40))
    assert_logits_equal_transformers(actual, folder, list(prompt_of(40)))


def test_llama_4_may_have_no_experts_and_no_scaling() -> None:
    folder = shared_checkpoint("Llama4ForCausalLM", **(LLAMA4 | {"moe_layers": [], "attn_scale": 0.0}))
    config = load_config(folder)
    assert config.query_scaling is None
    assert not any(map(config.is_sparse, range(3)))
    assert_logits_equal_transformers(Model(folder).logits(PROMPTS[0]), folder, list(PROMPTS[0]))


def test_a_new_family_is_one_module_and_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up family, a Llama whose MLP has other names and GELU, is served as soon as the table has it."""
    made_up = Family(
        traits=lambda raw, sizes: replace(llama.traits(raw, sizes), activation="gelu_tanh"),
        allowed={"hidden_act": allows("gelu_pytorch_tanh", why="a made-up reason")},
        stored={"feed_forward.w13": ("mlp.gate_proj", "mlp.up_proj"), "feed_forward.w2": ("mlp.down_proj",)},
    )
    monkeypatch.setitem(FAMILIES, "MadeUpForCausalLM", made_up)
    reference = shared_checkpoint("LlamaForCausalLM", hidden_act="gelu_pytorch_tanh")
    folder = copy_of(reference, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for index in range(3):
        layer = f"model.layers.{index}"
        gate, up, down = (tensors.pop(f"{layer}.mlp.{part}_proj.weight") for part in ("gate", "up", "down"))
        tensors[f"{layer}.feed_forward.w13.weight"] = torch.cat((gate, up))
        tensors[f"{layer}.feed_forward.w2.weight"] = down
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, architectures=["MadeUpForCausalLM"])
    with divided_engine(config_of(folder), 2) as engine:
        request = submit(engine, prompt_of(37), 8)
        assert_greedy(reference, prompt_of(37), run(engine)[request][0])
