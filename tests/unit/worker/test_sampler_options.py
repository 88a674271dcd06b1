"""Every sampling option draws the right distribution, checked against transformers' processors or its formula."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.step_plan import FAILED_TOKEN, NO_CHOICE
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .sampling import VOCAB_SIZE, Draw, assert_drawn_from, make_row, random_logits, sample, sample_rows

NUM_DRAWS = 6_000
PROMPT = [3, 3, 5, 30]
OUTPUT = [7, 7, 7, 9, 5]
FAR = 10**30
"""No vocabulary has it, and no 64 bits hold it."""

Expected = Callable[[torch.Tensor], torch.Tensor]
"""From a row's logits [1, V] to the logits that the token is drawn from."""


def draw_many(logits_V: torch.Tensor, **params: Any) -> list[int]:
    tokens = PROMPT + OUTPUT
    rows = [
        make_row(
            Draw(SamplingParams(seed=seed, max_tokens=64, **params), len(tokens), len(OUTPUT)),
            seed,
            list(tokens),
        )
        for seed in range(NUM_DRAWS)
    ]
    return sample_rows(logits_V.expand(NUM_DRAWS, -1), rows).tokens


def penalised_logits(seed: int) -> torch.Tensor:
    """[1, V], where the tokens that penalties are about are likely; two are of the prompt only."""
    logits_1V = random_logits(1, seed=seed)
    logits_1V[0, [3, 30, 7, 9, 5]] = torch.tensor([4.0, 3.5, 4.5, 3.0, 4.2])
    logits_1V[0, 21] = 2.8
    return logits_1V


def repetition(penalty: float) -> Expected:
    ids = torch.tensor([PROMPT + OUTPUT])
    return lambda logits_1V: RepetitionPenaltyLogitsProcessor(penalty)(ids, logits_1V.clone())


def output_penalties(frequency: float, presence: float) -> Expected:
    counts_V = torch.bincount(torch.tensor(OUTPUT), minlength=VOCAB_SIZE)
    return lambda logits_1V: logits_1V - frequency * counts_V - presence * (counts_V > 0)


def bias(biases: dict[int, float]) -> Expected:
    processor = SequenceBiasLogitsProcessor([[[token], value] for token, value in biases.items()])
    return lambda logits_1V: processor(torch.tensor([PROMPT]), logits_1V)


def only(kept: set[int]) -> Expected:
    dropped = [token for token in range(VOCAB_SIZE) if token not in kept]
    return lambda logits_1V: logits_1V.index_fill(1, torch.tensor(dropped), float("-inf"))


def warped(*processors: Any) -> Expected:
    def apply(logits_1V: torch.Tensor) -> torch.Tensor:
        for processor in processors:
            logits_1V = processor(None, logits_1V)
        return logits_1V

    return apply


CASES: list[tuple[dict[str, Any], list[Expected]]] = [
    ({"min_p": 0.1}, [warped(MinPLogitsWarper(0.1))]),
    ({"min_p": 1.0}, [warped(MinPLogitsWarper(1.0))]),
    (
        {"min_p": 0.02, "top_p": 0.8, "temperature": 1.5},
        [warped(TemperatureLogitsWarper(1.5), MinPLogitsWarper(0.02), TopPLogitsWarper(0.8))],
    ),
    (
        {"min_p": 0.01, "top_k": 8, "top_p": 0.9, "temperature": 0.7},
        [
            warped(
                TemperatureLogitsWarper(0.7),
                MinPLogitsWarper(0.01),
                TopKLogitsWarper(8),
                TopPLogitsWarper(0.9),
            )
        ],
    ),
    ({"repetition_penalty": 1.8}, [repetition(1.8)]),
    ({"repetition_penalty": 0.6}, [repetition(0.6)]),
    ({"frequency_penalty": 0.9}, [output_penalties(0.9, 0.0)]),
    ({"presence_penalty": 1.5}, [output_penalties(0.0, 1.5)]),
    ({"presence_penalty": -1.5, "frequency_penalty": -0.2}, [output_penalties(-0.2, -1.5)]),
    ({"logit_bias": ((4, 3.0), (17, -2.5), (FAR, 100.0), (-1, 100.0))}, [bias({4: 3.0, 17: -2.5})]),
    ({"logit_bias": ((4, 1.0), (4, 1.0))}, [bias({4: 2.0})]),
    ({"allowed_token_ids": frozenset({1, 8, 9, 33, VOCAB_SIZE, FAR})}, [only({1, 8, 9, 33})]),
    ({"bad_token_ids": frozenset({*range(20), VOCAB_SIZE, FAR})}, [only(set(range(20, VOCAB_SIZE)))]),
    (
        {"min_tokens": 20, "eos_token_ids": frozenset({0, 1}), "stop_token_ids": frozenset({7, FAR})},
        [only(set(range(VOCAB_SIZE)) - {0, 1, 7})],
    ),
    (
        # Bias, then repetition, then the others, then temperature, then filters: any other order differs.
        {
            "logit_bias": ((7, 6.0), (9, -3.0)),
            "bad_token_ids": frozenset({2}),
            "repetition_penalty": 1.4,
            "frequency_penalty": 0.7,
            "presence_penalty": 0.3,
            "temperature": 1.6,
            "top_k": 20,
            "top_p": 0.95,
        },
        [
            bias({7: 6.0, 9: -3.0}),
            only(set(range(VOCAB_SIZE)) - {2}),
            repetition(1.4),
            output_penalties(0.7, 0.3),
            warped(TemperatureLogitsWarper(1.6), TopKLogitsWarper(20), TopPLogitsWarper(0.95)),
        ],
    ),
]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("params", "steps"), CASES, ids=[",".join(params) for params, _ in CASES])
def test_draws_follow_transformers_processors(params: dict[str, Any], steps: list[Expected]) -> None:
    logits_1V = penalised_logits(3)
    scores_1V = logits_1V
    for step in steps:
        scores_1V = step(scores_1V)
    expected_V = torch.softmax(scores_1V[0], dim=-1)
    tokens = draw_many(logits_1V[0], **params)
    if int((expected_V > 0).sum()) == 1:
        assert set(tokens) == {int(expected_V.argmax())}
    else:
        assert_drawn_from(tokens, expected_V)
        likely = {token for token, share in enumerate(expected_V.tolist()) if share * NUM_DRAWS > 20}
        assert likely <= set(tokens)


@pytest.mark.parametrize(("params", "steps"), CASES, ids=[",".join(params) for params, _ in CASES])
def test_without_temperature_the_likeliest_after_masks_and_penalties_comes(
    params: dict[str, Any], steps: list[Expected]
) -> None:
    logits_1V = penalised_logits(8)
    scores_1V = logits_1V
    for step in steps:
        scores_1V = step(scores_1V)
    tokens = PROMPT + OUTPUT
    greedy = SamplingParams(max_tokens=64, **(params | {"temperature": 0.0}))
    row = make_row(Draw(greedy, len(tokens), len(OUTPUT)), 0, tokens)
    assert sample_rows(logits_1V, [row]).tokens == scores_1V.argmax(dim=-1).tolist()


@pytest.mark.ci
def test_min_p_wider_than_the_nucleus_candidates_equals_transformers() -> None:
    logits_V = 0.3 * random_logits(1, 3000, seed=4)[0]
    scores_1V = warped(MinPLogitsWarper(0.2), TopPLogitsWarper(0.95))(logits_V[None])
    tokens = draw_many(logits_V, min_p=0.2, top_p=0.95)
    assert_drawn_from(tokens, torch.softmax(scores_1V[0], dim=-1))


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": frozenset({VOCAB_SIZE, FAR})},
        {"bad_token_ids": frozenset(range(VOCAB_SIZE))},
        {"allowed_token_ids": frozenset({3}), "bad_token_ids": frozenset({3})},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_possible_token_fails_alone(temperature: float, params: dict[str, Any]) -> None:
    logits_RV = random_logits(3)
    plain = SamplingParams(seed=5)
    none_possible = SamplingParams(temperature=temperature, **params)
    tokens = sample(logits_RV, [Draw(p, 7, 0) for p in (plain, none_possible, plain)])
    [first] = sample(logits_RV[:1], [Draw(plain, 7, 0)])
    [last] = sample(logits_RV[2:], [Draw(plain, 7, 0)])
    assert tokens == [first, NO_CHOICE, last]


def test_infinity_fails_a_row_even_where_a_mask_would_hide_it() -> None:
    logits_RV = random_logits(2)
    logits_RV[0, 4] = float("inf")
    masked = SamplingParams(bad_token_ids=frozenset({4}))
    assert sample(logits_RV, [Draw(masked, 7, 0), Draw(masked, 7, 0)])[0] == FAILED_TOKEN


def test_logits_stay_as_they_are() -> None:
    logits_RV = random_logits(2)
    before_RV = logits_RV.clone()
    params = SamplingParams(
        logit_bias=((1, 5.0),), bad_token_ids=frozenset({2}), frequency_penalty=1.0, min_p=0.1, logprobs=2
    )
    sample(logits_RV, [Draw(params, 9, 4)] * 2)
    assert torch.equal(logits_RV, before_RV)


def test_a_fork_draws_what_its_outputs_would_draw_alone() -> None:
    logits_1V = random_logits(1)
    rows = [
        make_row(Draw(SamplingParams(seed=11, n=n, logprobs=0), 6, 0), sequence_id)
        for sequence_id, n in enumerate((16, 1, 3))
    ]
    drawn = sample_rows(logits_1V.expand(3, -1), rows)
    alone = [
        sample_rows(logits_1V, [make_row(Draw(SamplingParams(seed=11), 6, 0), 0, index=index)]).tokens[0]
        for index in range(16)
    ]
    assert drawn.tokens == alone[:1] * 3
    assert list(drawn.extras[0].tokens) == alone[1:16]
    assert drawn.extras[1].tokens == ()
    assert list(drawn.extras[2].tokens) == alone[1:3]
    assert [len(drawn.extras[row].logprobs) for row in range(3)] == [16, 1, 3]
    assert len(set(alone)) > 4


def test_outputs_of_a_fork_are_independent_draws() -> None:
    logits_1V = random_logits(1, seed=2)
    rows = [make_row(Draw(SamplingParams(seed=seed, n=4), 6, 0), seed) for seed in range(1500)]
    drawn = sample_rows(logits_1V.expand(1500, -1), rows)
    expected_V = torch.softmax(logits_1V[0], dim=-1)
    for output in range(3):
        assert_drawn_from([drawn.extras[row].tokens[output] for row in range(1500)], expected_V)
    pairs = [drawn.tokens[row] * VOCAB_SIZE + drawn.extras[row].tokens[0] for row in range(1500)]
    assert_drawn_from(pairs, torch.outer(expected_V, expected_V).flatten())
