"""Speculation changes no token, no logprob and no end of any output, whatever is drafted."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import SequenceOutput
from blockyard.worker.grammar.grammar import Grammar
from blockyard.worker.llm import LLM
from blockyard.worker.sequences.identifiers import RequestId
from blockyard.worker.sequences.sampling_params import SamplingParams

from . import test_engine_tokens
from .checkpoints import shared_checkpoint
from .drafting import AlwaysDrafts, ForcedDrafter, Output
from .test_engine_tokens import BLOCK_SIZE, Mode, make_engine, prompt_of, submit

DEMO = Path(__file__).parents[3] / "deploy" / "demo_model" / "checkpoint"
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.1, "top_k": 60, "seed": 5},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "seed": -3, "logprobs": 2},
    {"temperature": 0.0, "logprobs": 0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {
        "temperature": 1.0,
        "seed": 9,
        "repetition_penalty": 1.3,
        "logit_bias": ((17, 3.0),),
        "min_tokens": 11,
        "eos_token_ids": frozenset(range(60, 160)),
        "logprobs": 3,
    },
    {"temperature": 1.2, "seed": 2, "stop_token_ids": frozenset(range(0, 270, 9))},
    {"temperature": 0.9, "seed": 4, "n": 3, "logprobs": 1, "presence_penalty": 0.5},
    {"temperature": 0.9, "seed": 1, "bad_token_ids": frozenset(range(50)), "prompt_logprobs": 1},
    {"temperature": 0.7, "seed": 8, "allowed_token_ids": frozenset(range(0, 270, 3))},
    {"beam_width": 2, "n": 2},
]
Whole = dict[tuple[RequestId, int], tuple[Any, ...]]


def whole(outputs: list[SequenceOutput]) -> tuple[Any, ...]:
    """Return what an output got, however it was cut into steps."""
    tokens: list[int] = []
    for output in outputs:
        assert output.token_offset == len(tokens)
        tokens += output.token_ids
    last = outputs[-1]
    return (
        tokens,
        [logprob for output in outputs for logprob in output.logprobs],
        [logprob for output in outputs for logprob in output.prompt_logprobs],
        last.finish_reason,
        last.stop_token,
        last.state,
        last.cumulative_logprob,
    )


def run(engine: Engine, kinds: list[dict[str, Any]], max_tokens: int = 44) -> Whole:
    for number, kind in enumerate(kinds):
        submit(engine, prompt_of(5 + 7 * number, seed=number), max_tokens - number, **kind)
    outputs: dict[tuple[RequestId, int], list[SequenceOutput]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            outputs.setdefault((output.request_id, output.index), []).append(output)
        engine.scheduler.check_invariants()
    assert engine.pool.num_used == 0
    return {key: whole(found) for key, found in outputs.items()}


def known_of(results: Whole) -> dict[Output, list[int]]:
    return {
        (prompt_of(5 + 7 * request_id, seed=request_id), index): result[0]
        for (request_id, index), result in results.items()
    }


def tokens_of(results: Whole) -> dict[tuple[RequestId, int], list[int]]:
    return {key: result[0] for key, result in results.items()}


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return shared_checkpoint("Qwen2ForCausalLM")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Whole:
    return run(make_engine(checkpoint), KINDS)


@pytest.mark.ci
@pytest.mark.parametrize("share_right", [0.0, 0.8])
def test_no_draft_changes_what_a_request_gets(checkpoint: Path, expected: Whole, share_right: float) -> None:
    engine = make_engine(checkpoint)
    drafter = ForcedDrafter(known_of(expected), share_right=share_right)
    engine.scheduler.speculation = speculation = AlwaysDrafts(drafter)
    assert run(engine, KINDS) == expected
    assert speculation.num_drafted > 100
    assert (speculation.num_right > 100) == (share_right > 0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 11, "preempt": "recompute"},
        {"num_blocks": 11, "preempt": "swap", "swap_space_gib": 0.001},
        {"num_blocks": 24, "max_num_batched_tokens": 24, "max_num_seqs": 12, "host_cache_gib": 0.001},
        {"num_blocks": 30, "overlap_steps": "on"},
        {"num_blocks": 30, "num_ranks": 2},
    ],
)
def test_nor_beside_preemptions_chunks_overlapping_steps_and_ranks(
    checkpoint: Path, expected: Whole, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as running:
        settings = dict(settings)
        mode = Mode(num_ranks=settings.pop("num_ranks", 1), running=running)
        monkeypatch.setattr(test_engine_tokens, "MODE", mode)
        _check_beside(make_engine(checkpoint, max_model_len=7 * BLOCK_SIZE, **settings), expected, mode)


def _check_beside(engine: Engine, expected: Whole, mode: Mode) -> None:
    drafter = ForcedDrafter(known_of(expected), share_right=0.8)
    engine.scheduler.speculation = speculation = AlwaysDrafts(drafter)
    found = run(engine, KINDS)
    # With several ranks, sums are rounded otherwise.
    assert (found if mode.num_ranks == 1 else tokens_of(found)) == (
        expected if mode.num_ranks == 1 else tokens_of(expected)
    )
    assert speculation.num_right > 20
    if engine.pool.num_blocks == 11:
        assert engine.scheduler.num_preemptions > 0


CODE = Grammar(kind="regex", source="[a-f]{3}-[0-9]{2,40}!")
WILD = SamplingParams(seed=2, max_tokens=60, n=3, temperature=2.0, logprobs=1)


@pytest.mark.ci
def test_drafts_change_no_output_that_follows_a_grammar() -> None:
    prompts = [[5] * 9, [6] * 28]
    llm = LLM(str(DEMO), device="cpu", deterministic=True, kv_cache_memory=2**24, max_model_len=96)
    expected = llm.generate(prompts, WILD, structured_output=CODE)
    known = {
        (tuple(answer_prompt), index): output.token_ids
        for answer_prompt, answer in zip(prompts, expected, strict=True)
        for index, output in enumerate(answer.outputs)
    }
    speculation = AlwaysDrafts(ForcedDrafter(known, share_right=0.7, vocab_size=4096))
    masks = llm._loaded.masks
    assert masks is not None
    speculation.takes_grammar = masks.takes_drafts
    llm._engine.scheduler.speculation = speculation
    again = llm.generate(prompts, WILD, structured_output=CODE)
    assert [answer.outputs for answer in again] == [answer.outputs for answer in expected]
    assert speculation.num_right > 10


@pytest.mark.ci
def test_a_setting_switches_guesses_on_that_come_from_the_sequence_itself() -> None:
    settings: dict[str, Any] = {
        "device": "cpu",
        "deterministic": True,
        "kv_cache_memory": 2**24,
        "max_model_len": 256,
    }
    prompt = [11, 12, 13, 14, 15, 16, 17, 18] * 8
    sampling = SamplingParams(temperature=0.0, max_tokens=150)
    off, on = LLM(str(DEMO), **settings), LLM(str(DEMO), speculation="ngram", **settings)
    assert on.generate([prompt], sampling)[0].outputs == off.generate([prompt], sampling)[0].outputs
    load = on._engine.load()
    assert load.drafted_tokens >= load.accepted_tokens
    assert off._engine.load().drafted_tokens == 0
    # An output that repeats itself, so guesses are right.
    assert on._engine.scheduler.speculation is not None
    assert load.accepted_tokens > 20
