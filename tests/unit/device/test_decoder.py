"""A runner against transformers: the same greedy tokens for any make-up of a step, and drawn ones by position.

Needs torch, transformers and safetensors only. With CUDA the same tests run on Triton.
"""

from collections.abc import Callable

import pytest
import torch
from blockyard.worker.execution.runner import TorchRunner
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.step_plan import FAILED_TOKEN

from tests.unit.worker.checkpoints import ARCHITECTURES, reference_model, shared_checkpoint
from tests.unit.worker.sampling import Draw, sample
from tests.unit.worker.steps import (
    DEVICE,
    NEAR_GAP,
    Model,
    execute,
    generate,
    make_runner,
    make_sequences,
    row_of,
    spoil,
)
from tests.unit.worker.token_engines import greedy, prompt_of

NUM_TOKENS = 8
MODES = ["plain", "torch", "deterministic"] if DEVICE.type == "cpu" else ["plain"]
UNEVEN_PROMPTS = [prompt_of(1 + 7 * index % 61, seed=index) for index in range(17)]

Make = Callable[..., TorchRunner]


@pytest.fixture(params=MODES)
def make(request: pytest.FixtureRequest) -> Make:
    def make(architecture: str = "LlamaForCausalLM") -> TorchRunner:
        return make_runner(
            shared_checkpoint(architecture),
            deterministic=request.param == "deterministic",
            backend="torch" if request.param == "torch" else "auto",
        )

    return make


def expected(prompt: tuple[int, ...], architecture: str = "LlamaForCausalLM") -> list[int]:
    return greedy(shared_checkpoint(architecture), prompt, NUM_TOKENS, NEAR_GAP)


def first_tokens(runner: TorchRunner, prompts: list[tuple[int, ...]]) -> list[int]:
    return [tokens[0] for tokens in generate(runner, make_sequences(prompts), 1, 1000)]


@pytest.mark.parametrize(
    ("prompts", "chunk"),
    [([prompt_of(29)], 1000), ([prompt_of(61)], 7), (UNEVEN_PROMPTS, 19)],
    ids=["alone", "a chunked prompt", "decodes, whole prompts and pieces of prompts"],
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_transformers(
    architecture: str, make: Make, prompts: list[tuple[int, ...]], chunk: int
) -> None:
    tokens = generate(make(architecture), make_sequences(prompts), NUM_TOKENS, chunk)
    assert tokens == [expected(prompt, architecture) for prompt in prompts]


def test_sampled_tokens_are_drawn_by_position_from_transformers_logits(make: Make) -> None:
    prompt = prompt_of(23)
    likely = frozenset(expected(prompt)[:1])
    sampling = {"temperature": 3.0, "top_p": 0.95, "seed": -7, "max_tokens": NUM_TOKENS, "min_tokens": 4}
    sampling["stop_token_ids"] = likely
    tokens = list(prompt)
    for num_generated in range(NUM_TOKENS):
        with torch.inference_mode():
            reference = reference_model(shared_checkpoint("LlamaForCausalLM"))
            logits_1V = reference(torch.tensor([tokens])).logits[:, -1]
        tokens += sample(logits_1V, [Draw(SamplingParams(**sampling), len(tokens), num_generated)])
    sequences = make_sequences([prompt, prompt_of(9), prompt_of(40)], **sampling)
    assert generate(make(), sequences, NUM_TOKENS, 10)[0] == tokens[23:] != expected(prompt)


def test_equal_prompts_of_one_step_may_share_blocks(make: Make) -> None:
    """The second sequence computes its last token only, and reads blocks that the first writes meanwhile."""
    prompt = prompt_of(33)
    first, second = make_sequences([prompt, prompt])
    second.block_table.assign([*first.block_table[:2], *second.block_table[2:]])
    tokens = execute(make(), row_of(second, 32), row_of(first)).tokens
    assert tokens == expected(prompt)[:1] * 2


def test_a_step_may_start_from_a_token_that_is_not_committed_yet(make: Make) -> None:
    runner, prompt = make("Qwen3ForCausalLM"), prompt_of(18)
    [sequence] = make_sequences([prompt])
    tokens = execute(runner, row_of(sequence)).tokens
    for position in range(18, 17 + NUM_TOKENS):
        tokens += execute(runner, row_of(sequence, position, position + 1)).tokens
        # Committed one step late, as an engine with a step in flight does.
        sequence.tokens.append(tokens[-2])
    assert tokens == expected(prompt, "Qwen3ForCausalLM")


@pytest.mark.skipif(DEVICE.type != "cpu", reason="deterministic mode is the CPU's")
def test_deterministic_logits_are_the_same_bits_alone_and_in_a_batch() -> None:
    model = Model(shared_checkpoint("Qwen3ForCausalLM"), deterministic=True)
    prompts = sorted(UNEVEN_PROMPTS, key=lambda tokens: len(tokens) > 1)
    rows = [(tokens, 0, list(range(4 * index, 4 * index + 4))) for index, tokens in enumerate(prompts)]
    for tokens, logits_TV in zip(prompts, model.step(rows), strict=True):
        assert torch.equal(logits_TV, model.logits(tokens))


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"linears": "int8"}], ids=str)
def test_rounded_numbers_stay_near_float32(settings: dict[str, str]) -> None:
    try:
        rounded = make_runner(shared_checkpoint("LlamaForCausalLM"), **settings)
    except ValueError as error:
        pytest.skip(str(error))
    assert rounded.dtype == getattr(torch, settings.get("dtype", "float32"))
    prompts = [prompt_of(length) for length in range(5, 37)]
    found = first_tokens(rounded, prompts)
    exact = first_tokens(make_runner(shared_checkpoint("LlamaForCausalLM")), prompts)
    assert sum(map(int.__eq__, found, exact)) >= 0.8 * len(prompts)
    if "linears" in settings:  # A request does not show its company.
        together = generate(rounded, make_sequences(prompts[:6]), NUM_TOKENS, 1000)
        for prompt, tokens in zip(prompts, together, strict=False):
            assert generate(rounded, make_sequences([prompt]), NUM_TOKENS, 1000) == [tokens]


def test_neither_a_warm_up_nor_what_a_recycled_block_held_changes_a_result(make: Make) -> None:
    runner, prompts = make("MistralForCausalLM"), [prompt_of(21), prompt_of(5)]
    runner.warm_up()
    spoil(runner.kv_pools)
    tokens = generate(runner, make_sequences(prompts), NUM_TOKENS, 1000)
    assert tokens == [expected(prompt, "MistralForCausalLM") for prompt in prompts]


def test_a_model_that_yields_nan_is_refused_at_warm_up(make: Make) -> None:
    runner = make()
    runner._decoder._weights.final_norm_H.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite in"):
        runner.warm_up()


def test_a_step_after_logits_that_are_not_finite_fails_alone(make: Make) -> None:
    """The failed sequence may already stand in the next step, beside healthy ones."""
    runner, prompt = make(), prompt_of(18)
    failing, healthy = make_sequences([prompt, prompt])
    assert execute(runner, row_of(failing, 17)).tokens == [FAILED_TOKEN], "its first tokens are not there"
    failing.tokens.append(FAILED_TOKEN)
    tokens = execute(runner, row_of(failing, 18), row_of(healthy)).tokens
    assert tokens == [FAILED_TOKEN, expected(prompt)[0]]
