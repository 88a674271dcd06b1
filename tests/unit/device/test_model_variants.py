"""Variants that config.json can describe, each against transformers: rope scaling, biases, windows, tied weights.

The tests run the decoder alone: a prompt whole, in chunks, and token by token, with NaN in every unwritten block.
Prompts are longer than every window and than the training context of a scaled rope.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.kernels.attention.plan import plan_attention
from blockyard.kernels.interface import BackendName
from blockyard.kernels.selection import choose_backend
from blockyard.worker.model.config import load_config
from blockyard.worker.model.decoder import Decoder
from blockyard.worker.model.families.table import FAMILIES
from blockyard.worker.model.rotary_table import rotary_table
from blockyard.worker.model.traits.family import Sizes
from blockyard.worker.model.weights import load_weights
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.unit.worker.checkpoints import (
    ARCHITECTURES,
    assert_logits_equal_transformers,
    make_checkpoint,
    reference_greedy,
    reference_logits,
    shared_checkpoint,
)

BLOCK_SIZE = 16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MIN_GAP = 2.5e-4
MODES = [False, True] if DEVICE.type == "cpu" else [False]
PROMPT_LENGTH = 75
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
    "qwen2-window-off": ("Qwen2ForCausalLM", QWEN_WINDOW | {"use_sliding_window": False}),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Model:
    """One checkpoint's decoder and pool, driven without a runner."""

    def __init__(
        self,
        folder: Path,
        *,
        name: BackendName = "auto",
        deterministic: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config = load_config(folder)
        weights = load_weights(folder, self.config, dtype=dtype, device=DEVICE)
        self.backend = choose_backend(DEVICE, requested=name, deterministic=deterministic)
        self.decoder = Decoder(self.config, weights, self.backend)
        shape = (40, 2, self.config.num_kv_heads, BLOCK_SIZE, self.config.head_dim)
        self.pools = [
            torch.full(shape, float("nan"), dtype=dtype, device=DEVICE) for _ in range(self.config.num_layers)
        ]

    def step(self, rows: list[tuple[list[int], int, list[int]]]) -> list[torch.Tensor]:
        """Logits of each row of (its context so far, how much of it is computed, its blocks)."""
        query_lens = [len(context) - computed for context, computed, _ in rows]
        plan = plan_attention(
            query_lens=query_lens,
            context_lens=[len(context) for context, _, _ in rows],
            block_tables=[table for _, _, table in rows],
            block_size=BLOCK_SIZE,
            device=DEVICE,
            num_kv_heads=self.config.num_kv_heads,
        )
        tokens_T = torch.tensor(
            [t for context, computed, _ in rows for t in context[computed:]], device=DEVICE
        )
        with torch.inference_mode():
            logits_TV = self.decoder.forward(
                tokens_T, self.pools, plan, torch.arange(len(tokens_T), device=DEVICE)
            )
        return list(logits_TV.cpu().split(query_lens))


@pytest.fixture(scope="module", params=VARIANTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, overrides = VARIANTS[request.param]
    return make_checkpoint(tmp_path_factory.mktemp(request.param), architecture, **overrides)


def prompt(length: int = PROMPT_LENGTH, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, 272, (length,), generator=generator).tolist()


def generate(model: Model, prompts: list[list[int]], chunk_tokens: int) -> list[list[int]]:
    """Greedily, all prompts in the same steps, decodes first, on blocks that lie scattered over the pool."""
    contexts = [list(tokens) for tokens in prompts]
    computed = [0] * len(prompts)
    blocks = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    tables = [blocks[index :: len(prompts)] for index in range(len(prompts))]
    while True:
        running = [i for i, tokens in enumerate(prompts) if len(contexts[i]) < len(tokens) + NUM_TOKENS]
        if not running:
            return [context[len(tokens) :] for context, tokens in zip(contexts, prompts, strict=True)]
        ends = {i: min(computed[i] + chunk_tokens, len(contexts[i])) for i in running}
        order = sorted(running, key=lambda i: ends[i] - computed[i] > 1)
        results = model.step([(contexts[i][: ends[i]], computed[i], tables[i]) for i in order])
        for i, logits_TV in zip(order, results, strict=True):
            computed[i] = ends[i]
            if ends[i] == len(contexts[i]):
                contexts[i].append(int(logits_TV[-1].argmax()))


@pytest.mark.parametrize("deterministic", MODES)
def test_logits_equal_transformers_at_every_position(folder: Path, deterministic: bool) -> None:
    tokens = prompt()
    [actual] = Model(folder, deterministic=deterministic).step([(tokens, 0, list(range(5)))])
    assert_logits_equal_transformers(actual, folder, tokens)


@pytest.mark.parametrize("deterministic", MODES)
def test_greedy_tokens_equal_transformers_in_chunks_and_in_company(folder: Path, deterministic: bool) -> None:
    prompts = [prompt(), prompt(40, seed=1), prompt(9, seed=2)]
    references = [reference_greedy(folder, tuple(tokens), NUM_TOKENS) for tokens in prompts]
    # Otherwise a difference in rounding could excuse a different token.
    assert min(reference.min_gap for reference in references) > MIN_GAP
    tokens = generate(Model(folder, deterministic=deterministic), prompts, chunk_tokens=19)
    assert tokens == [list(reference.tokens) for reference in references]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="deterministic mode is the CPU's")
def test_deterministic_logits_are_the_same_bits_in_chunks(folder: Path) -> None:
    tokens = prompt()
    model = Model(folder, deterministic=True)
    [whole] = model.step([(tokens, 0, list(range(5)))])
    others = list(range(20, 25))
    chunks = [
        model.step([(tokens[:end], start, others)])[0]
        for start, end in ((0, 1), (1, 30), (30, 31), (31, 47), (47, 75))
    ]
    assert torch.equal(torch.cat(chunks), whole)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "qwen2-window-off"])
def test_every_variant_changes_the_result(variant: str, tmp_path: Path) -> None:
    """A field that no code reads would pass every comparison if it did not change the result."""
    architecture, overrides = VARIANTS[variant]
    tokens = prompt()
    changed = reference_logits(make_checkpoint(tmp_path, architecture, **overrides), tokens)
    plain = reference_logits(shared_checkpoint(architecture), tokens)
    assert (changed - plain).abs().max() > 20 * MIN_GAP


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
    config = ARCHITECTURES[architecture][0](num_hidden_layers=3, **raw)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [SLIDING if window is not None else FULL] * 3
    assert hiding(window if kind == SLIDING else None for kind in kinds) == expected
