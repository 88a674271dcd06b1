"""Speculation changes no token, no logprob and no end of any output, whatever is drafted, and by what."""

from pathlib import Path
from typing import Any

import pytest
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import Continuation
from blockyard.worker.grammar.grammar import Grammar
from blockyard.worker.llm import LLM
from blockyard.worker.sequences.sampling_params import SamplingParams

from .checkpoints import shared_checkpoint
from .drafting import (
    KINDS,
    AlwaysDrafts,
    ForcedDrafter,
    Whole,
    always,
    drafted_engine,
    known_of,
    run_kinds,
)
from .ranks import divided_engine
from .token_engines import BLOCK_SIZE, DEMO, config_of, outputs_of, prompt_of, submit, tokens_of

CHECKPOINT = "Qwen2ForCausalLM"
SETTINGS: list[dict[str, Any]] = [
    {"num_blocks": 9, "preempt": "recompute"},
    {"num_blocks": 9, "preempt": "swap", "swap_space_gib": 0.001},
    {"num_blocks": 24, "max_num_batched_tokens": 24, "host_cache_gib": 0.001},
    {"num_blocks": 30, "overlap_steps": "on"},
    {},
]


@pytest.fixture(scope="module")
def expected() -> Whole:
    return run_kinds(drafted_engine(shared_checkpoint(CHECKPOINT)))


def check(engine: Engine, speculation: AlwaysDrafts, expected: Whole, *, num_ranks: int = 1) -> None:
    """Check that every output stays the same, although there are drafts. Ranks round sums in another order."""
    found = run_kinds(engine)
    if num_ranks == 1:
        assert found == expected
    assert {key: whole[0] for key, whole in found.items()} == {
        key: whole[0] for key, whole in expected.items()
    }
    assert speculation.num_drafted > 40
    if engine.pool.num_blocks == 9:
        assert engine.scheduler.num_preemptions > 0


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("settings", [*SETTINGS, {"num_blocks": 30, "num_ranks": 2}])
@pytest.mark.parametrize("share_right", [0.8, 0.0])
def test_no_forced_draft_changes_what_a_request_gets(
    expected: Whole, settings: dict[str, Any], share_right: float
) -> None:
    num_ranks = settings.get("num_ranks", 1)
    config = config_of(
        shared_checkpoint(CHECKPOINT),
        **({"deterministic": True, "max_num_seqs": 24, "max_model_len": 112} | settings),
    )
    with divided_engine(config, num_ranks) as engine:
        drafter = ForcedDrafter(known_of(expected), share_right=share_right)
        engine.scheduler.speculation = speculation = AlwaysDrafts(drafter)
        check(engine, speculation, expected, num_ranks=num_ranks)
        assert (speculation.num_right > 20) == (share_right > 0)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("is_right", [True, False])
def test_no_guess_of_a_model_changes_what_a_request_gets(
    expected: Whole, settings: dict[str, Any], is_right: bool
) -> None:
    """The served model is always right, greedy or drawn. One with other weights is nearly always wrong."""
    served, other = shared_checkpoint(CHECKPOINT), shared_checkpoint("LlamaForCausalLM", num_hidden_layers=1)
    engine = drafted_engine(served, served if is_right else other, max_model_len=7 * BLOCK_SIZE, **settings)
    speculation, _ = always(engine)
    check(engine, speculation, expected)
    # A chunk and a decode may round a near tie otherwise.
    share = speculation.num_right / speculation.num_drafted
    assert share >= 0.97 if is_right and not settings else (share > 0.9) == is_right


def test_a_replay_from_any_token_goes_on_as_before(expected: Whole) -> None:
    number, (tokens, logprobs, *_) = 4, expected[4, 0]  # type: ignore[index]
    half = len(tokens) // 2
    engine = drafted_engine(shared_checkpoint(CHECKPOINT), shared_checkpoint(CHECKPOINT))
    speculation, _ = always(engine)
    already = (Continuation(index=0, token_ids=tuple(tokens[:half])),)
    key = submit(engine, prompt_of(5 + 7 * number, number), 40, continuations=already, **KINDS[number]), 0
    outputs = outputs_of(engine)[key]
    assert tokens_of(outputs, half) == tokens[half:]
    assert [logprob for output in outputs for logprob in output.logprobs] == logprobs[half:]
    assert speculation.num_right > 0


CODE = Grammar(kind="regex", source="[a-f]{3}-[0-9]{2,40}!")
WILD = SamplingParams(seed=2, max_tokens=30, n=2, temperature=2.0, logprobs=1)
DEMO_SETTINGS: dict[str, Any] = {"device": "cpu", "deterministic": True, "max_num_seqs": 8}


def force(llm: LLM, known: Any) -> AlwaysDrafts:
    llm._engine.scheduler.speculation = speculation = AlwaysDrafts(
        ForcedDrafter(known, share_right=0.7, vocab_size=4096)
    )
    return speculation


@pytest.mark.parametrize("draft_model", [None, DEMO], ids=["forced", "a model"])
def test_drafts_change_no_output_that_follows_a_grammar(draft_model: Path | None) -> None:
    prompts = [[6] * 28]
    plain = LLM(str(DEMO), kv_cache_memory=2**24, max_model_len=96, **DEMO_SETTINGS)
    expected = plain.generate(prompts, WILD, structured_output=CODE)
    if draft_model is None:
        drafted = plain
        speculation = force(
            plain,
            {
                (tuple(prompt), index): output.token_ids
                for prompt, answer in zip(prompts, expected, strict=True)
                for index, output in enumerate(answer.outputs)
            },
        )
    else:
        drafted = LLM(
            str(DEMO), kv_cache_memory=2**25, max_model_len=96, draft_model=str(draft_model), **DEMO_SETTINGS
        )
        speculation, _ = always(drafted._engine)
    masks = drafted._loaded.masks
    assert masks is not None
    speculation.takes_grammar = masks.takes_drafts
    found = drafted.generate(prompts, WILD, structured_output=CODE)
    assert [answer.outputs for answer in found] == [answer.outputs for answer in expected]
    assert (speculation.num_right if draft_model is None else speculation.num_drafted) > 5


def test_a_setting_switches_guesses_on_that_come_from_the_sequence_itself() -> None:
    """An output that repeats itself, so guesses are right."""
    settings = DEMO_SETTINGS | {"kv_cache_memory": 2**24, "max_model_len": 256}
    prompt = [11, 12, 13, 14, 15, 16, 17, 18] * 8
    sampling = SamplingParams(temperature=0.0, max_tokens=150)
    off, on = LLM(str(DEMO), **settings), LLM(str(DEMO), speculation="ngram", **settings)
    assert on.generate([prompt], sampling)[0].outputs == off.generate([prompt], sampling)[0].outputs
    guessed, none = (llm._engine.load() for llm in (on, off))
    assert guessed.drafted_tokens >= guessed.accepted_tokens > 20
    assert none.drafted_tokens == 0
