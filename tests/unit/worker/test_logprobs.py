"""Logprobs, ranks and beams' candidates against torch.log_softmax; prompt logprobs against transformers' logits."""

from typing import Any

import pytest
import torch
from blockyard.worker.execution.runner import TorchRunner
from blockyard.worker.sequences.prompt_scoring import SCORED_AT_ONCE
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import Sequence, TokenLogprob
from blockyard.worker.sequences.step_plan import FAILED_TOKEN, NO_TOKEN, ScheduledRow

from .checkpoints import reference_logits, shared_checkpoint
from .sampling import VOCAB_SIZE, Draw, make_row, random_logits, sample_rows
from .steps import BLOCK_SIZE, execute, make_runner, make_sequence, row_of, spoil
from .token_engines import prompt_of

TOLERANCE = 1e-4
ODD: dict[str, Any] = {
    # Everything that changes the choice and must not change what is reported.
    "temperature": 1.7,
    "top_k": 9,
    "min_p": 0.01,
    "frequency_penalty": 1.0,
    "repetition_penalty": 2.0,
    "logit_bias": ((3, 4.0),),
    "bad_token_ids": frozenset({0}),
}


def assert_is_models(reported: TokenLogprob, logits_V: torch.Tensor, token: int, num_top: int) -> None:
    logprobs_V = torch.log_softmax(logits_V.float(), dim=-1)
    assert reported.token_id == token
    assert reported.logprob == pytest.approx(float(logprobs_V[token]), abs=TOLERANCE)
    # By sorting, not by counting; equals share the best rank among them.
    descending = sorted(logits_V.tolist(), reverse=True)
    assert reported.rank == 1 + descending.index(float(logits_V[token]))
    assert [logprob for _, logprob in reported.top] == pytest.approx(
        logprobs_V.sort(descending=True).values[:num_top].tolist(), abs=TOLERANCE
    )
    assert all(logprob == pytest.approx(float(logprobs_V[t]), abs=TOLERANCE) for t, logprob in reported.top)
    assert len({t for t, _ in reported.top}) == len(reported.top)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs_are_the_models_own_whatever_the_choice_was(num_top: int, dtype: torch.dtype) -> None:
    kinds: list[dict[str, Any]] = [ODD, {"temperature": 0.0}, ODD | {"n": 5}, {}]
    logits_SV = random_logits(40).to(dtype)
    rows = [
        make_row(Draw(SamplingParams(seed=row, logprobs=num_top, **kinds[row % 4]), 9, 0), row)
        for row in range(40)
    ]
    result = sample_rows(logits_SV, rows)
    for row, token in enumerate(result.tokens):
        tokens = [token, *result.extras[row].tokens]
        assert len(result.extras[row].logprobs) == len(tokens) == rows[row].num_outputs
        for reported, drawn in zip(result.extras[row].logprobs, tokens, strict=True):
            assert_is_models(reported, logits_SV[row], drawn, num_top)


def test_rows_that_ask_for_no_logprobs_or_fail_get_none() -> None:
    logits_SV = random_logits(3)
    logits_SV[2, 0] = float("nan")
    rows = [make_row(Draw(SamplingParams(logprobs=n), 9, 0), row) for row, n in enumerate((None, 2, 2))]
    result = sample_rows(logits_SV, rows)
    assert result.extras.keys() == {1}
    assert result.tokens[2] == FAILED_TOKEN


def test_a_vocabulary_smaller_than_what_is_asked_for_is_named_row_of() -> None:
    result = sample_rows(random_logits(1, 6), [make_row(Draw(SamplingParams(logprobs=20), 9, 0), 0)])
    assert sorted(token for token, _ in result.extras[0].logprobs[0].top) == list(range(6))


@pytest.mark.parametrize(("width", "ends"), [(1, ()), (4, (2,)), (3, (0, 1, 2, 3)), (30, (5,))])
def test_candidates_of_a_beam_are_the_likeliest_tokens(width: int, ends: tuple[int, ...]) -> None:
    logits_SV = random_logits(4)
    beam = SamplingParams(beam_width=width, eos_token_ids=frozenset(ends), temperature=1.0)
    rows = [make_row(Draw(SamplingParams(logprobs=1), 9, 0), 0)]
    rows += [make_row(Draw(beam, 9, 0), number) for number in (1, 2, 3)]
    logits_SV[2, 7] = float("inf")
    result = sample_rows(logits_SV, rows)
    expected = torch.log_softmax(logits_SV, dim=-1).sort(dim=-1, descending=True)
    count = min(VOCAB_SIZE, width + len(ends))
    assert result.extras[0].candidates == ()
    assert result.tokens[2] == FAILED_TOKEN
    assert 2 not in result.extras
    for row in (1, 3):
        tokens, logprobs = zip(*result.extras[row].candidates, strict=True)
        assert list(tokens) == expected.indices[row, :count].tolist()
        assert list(logprobs) == pytest.approx(expected.values[row, :count].tolist(), abs=TOLERANCE)
        assert result.tokens[row] == tokens[0]


def test_a_beam_below_min_tokens_cannot_end_and_keeps_the_others_logprobs() -> None:
    logits_1V = random_logits(1, 6)
    beam = SamplingParams(beam_width=5, eos_token_ids=frozenset({int(logits_1V.argmax())}), min_tokens=2)
    logprobs_V = torch.log_softmax(logits_1V[0], dim=-1)
    expected = sorted(((float(p), t) for t, p in enumerate(logprobs_V)), reverse=True)
    free, kept = (
        sample_rows(logits_1V, [make_row(Draw(beam, 9, num_generated), 0)]).extras[0].candidates
        for num_generated in (2, 1)
    )
    assert [token for token, _ in free] == [token for _, token in expected]
    assert [token for token, _ in kept[:-1]] == [token for _, token in expected[1:]]
    assert kept[:-1] == tuple(pair for pair in free if pair[0] != expected[0][1])
    assert kept[-1] == (expected[0][1], float("-inf"))


LLAMA = "LlamaForCausalLM"


@pytest.fixture(scope="module")
def runner() -> TorchRunner:
    return make_runner(shared_checkpoint(LLAMA), device="cpu")


def sequence_of(number: int, length: int, first_block: int, **params: Any) -> Sequence:
    blocks = range(first_block, first_block + -(-(length + 1) // BLOCK_SIZE))
    return make_sequence(prompt_of(length), blocks, number, **params)


def ordered(*sequences: Sequence) -> list[ScheduledRow]:
    """Return rows of whole prompts, those of one token first."""
    return sorted(map(row_of, sequences), key=lambda row: row.num_tokens > 1)


def logits_of(sequence: Sequence) -> torch.Tensor:
    return reference_logits(shared_checkpoint(LLAMA), list(sequence.tokens))


def likeliest(sequence: Sequence) -> int:
    return int(logits_of(sequence)[-1].argmax())


@pytest.mark.parametrize("length", [1, 2, 100, SCORED_AT_ONCE, SCORED_AT_ONCE + 1, 500])
def test_prompt_logprobs_equal_transformers_beside_other_rows(length: int, runner: TorchRunner) -> None:
    scored = sequence_of(0, length, 0, prompt_logprobs=3, logprobs=0)
    others = [sequence_of(number, 20 + number, 30 + 3 * number) for number in (1, 2, 3)]
    result = execute(runner, *ordered(others[0], scored, *others[1:]))
    rows = [others[0], scored, *others[1:]] if length > 1 else [scored, *others]
    assert result.tokens == [likeliest(sequence) for sequence in rows]
    place = rows.index(scored)
    extras = result.extras[place]
    assert result.extras.keys() == {place}
    logits_TV = logits_of(scored)
    assert len(extras.prompt_logprobs) == length - 1
    for position, reported in enumerate(extras.prompt_logprobs):
        token = scored.tokens[position + 1]
        logprobs_V = torch.log_softmax(logits_TV[position], dim=-1)
        assert reported.token_id == token
        assert reported.logprob == pytest.approx(float(logprobs_V[token]), abs=1e-3)
        assert [p for _, p in reported.top] == pytest.approx(logprobs_V.topk(3).values.tolist(), abs=1e-3)
    expected = float(torch.log_softmax(logits_TV[-1], dim=-1).max())
    assert extras.logprobs[0].logprob == pytest.approx(expected, abs=1e-3)
    assert extras.logprobs[0].rank == 1


def test_prompt_logprobs_in_chunks_equal_those_of_the_whole_prompt(runner: TorchRunner) -> None:
    whole_prompt = execute(runner, row_of(sequence_of(0, 301, 0, prompt_logprobs=1))).extras[0]
    chunked = sequence_of(1, 301, 40, prompt_logprobs=1)
    reported: list[TokenLogprob] = []
    for start in range(0, 301, 43):
        end = min(start + 43, 301)
        row = ScheduledRow(sequence=chunked, start=start, num_tokens=end - start, samples=end == 301)
        result = execute(runner, row)
        assert (result.tokens == [NO_TOKEN]) == (end < 301)
        part = result.extras[0].prompt_logprobs
        assert len(part) == min(end, 300) - start
        reported += part
    assert [r.token_id for r in reported] == [r.token_id for r in whole_prompt.prompt_logprobs]
    expected = pytest.approx([r.logprob for r in whole_prompt.prompt_logprobs], abs=1e-3)
    assert [r.logprob for r in reported] == expected


def test_rows_that_share_blocks_of_a_scored_prompt_read_them_after_they_are_written(
    runner: TorchRunner,
) -> None:
    spoil(runner.kv_pools)
    scored = sequence_of(0, 300, 0, prompt_logprobs=0)
    sharing = sequence_of(1, 300, 30)
    sharing.block_table.assign([*scored.block_table[:18], *sharing.block_table[18:]])
    rest = ScheduledRow(sequence=sharing, start=288, num_tokens=12, samples=True)
    tokens = execute(runner, rest, row_of(scored)).tokens
    assert tokens == [likeliest(scored)] * 2


def test_no_more_logits_than_the_bound_are_held_at_once(
    runner: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    logits = runner._decoder.logits

    def watch(hidden_SH: torch.Tensor) -> torch.Tensor:
        held.append(len(hidden_SH))
        return logits(hidden_SH)

    monkeypatch.setattr(runner._decoder, "logits", watch)
    execute(runner, row_of(sequence_of(0, 300, 0, prompt_logprobs=0)), row_of(sequence_of(1, 20, 30)))
    assert held == [SCORED_AT_ONCE, 299 - SCORED_AT_ONCE, 2]
