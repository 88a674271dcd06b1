"""The sampler draws the right distribution, the same token for the same row, and no forbidden token.

Every option is checked against the processors of transformers, or against its formula.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from blockyard.kernels.torch.nucleus import NUCLEUS_CANDIDATES
from blockyard.proto.limits import RANGES
from blockyard.worker.sampling import draw as drawing
from blockyard.worker.sampling import sampler
from blockyard.worker.sampling.draw import uniforms
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

from tests.unit.worker.sampling import (
    VOCAB_SIZE,
    Draw,
    assert_drawn_from,
    make_row,
    random_logits,
    sample,
    sample_rows,
)

NUM_DRAWS = 4_000
PROMPT = [3, 3, 5, 30]
OUTPUT = [7, 7, 7, 9, 5]
TOKENS = PROMPT + OUTPUT
FAR = 10**30
"""No vocabulary has it, and no 64 bits hold it."""

Expected = Callable[[torch.Tensor], torch.Tensor]
"""From a row's logits [1, V] to the logits that the token is drawn from."""


def draw(position: int = 7, *, num_generated: int = 0, **params: Any) -> Draw:
    return Draw(SamplingParams(max_tokens=64, **params), position, num_generated)


def draw_many(logits_V: torch.Tensor, **params: Any) -> list[int]:
    rows = [
        make_row(draw(len(TOKENS), num_generated=len(OUTPUT), seed=seed, **params), seed, list(TOKENS))
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
    ids = torch.tensor([TOKENS])
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


def warped(temperature: float = 1.0, *, min_p: float = 0, top_k: int = 0, top_p: float = 1) -> Expected:
    """Return the filters of transformers in the order in which they follow each other."""

    def apply(logits_1V: torch.Tensor) -> torch.Tensor:
        logits_1V = TemperatureLogitsWarper(temperature)(None, logits_1V)
        if min_p:
            logits_1V = MinPLogitsWarper(min_p)(None, logits_1V)
        if top_k:
            logits_1V = TopKLogitsWarper(top_k)(None, logits_1V)
        return logits_1V if top_p == 1 else TopPLogitsWarper(top_p)(None, logits_1V)

    return apply


FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.7},
    {"top_k": 1},
    {"top_p": 1e-6},
    {"top_k": 100, "top_p": 0.95},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 0.02, "top_p": 0.8, "temperature": 1.5},
    {"min_p": 0.01, "top_k": 8, "top_p": 0.9, "temperature": 0.7},
]
CASES: list[tuple[dict[str, Any], list[Expected]]] = [
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
            warped(1.6, top_k=20, top_p=0.95),
        ],
    ),
    *((params, [warped(**params)]) for params in FILTERS),
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
]
NAMES = [",".join(params) for params, _ in CASES]


def scores(logits_1V: torch.Tensor, steps: list[Expected]) -> torch.Tensor:
    for step in steps:
        logits_1V = step(logits_1V)
    return logits_1V


def check_draws(logits_1V: torch.Tensor, expected: torch.Tensor, **params: Any) -> None:
    """Check draws of one row against the logits that they must be drawn from."""
    expected_V = torch.softmax(expected[0], dim=-1)
    tokens = draw_many(logits_1V[0], **params)
    assert set(tokens) <= set(expected_V.nonzero().flatten().tolist())
    if len(set(tokens)) > 1:
        assert_drawn_from(tokens, expected_V)
    assert {token for token, share in enumerate(expected_V.tolist()) if share * NUM_DRAWS > 20} <= set(tokens)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(("params", "steps"), CASES, ids=NAMES)
def test_draws_follow_transformers_processors(params: dict[str, Any], steps: list[Expected]) -> None:
    logits_1V = penalised_logits(3)
    check_draws(logits_1V, scores(logits_1V, steps), **params)


@pytest.mark.parametrize(("params", "steps"), CASES, ids=NAMES)
def test_without_temperature_the_likeliest_after_masks_and_penalties_comes(
    params: dict[str, Any], steps: list[Expected]
) -> None:
    logits_1V = penalised_logits(8)
    greedy = draw(len(TOKENS), num_generated=len(OUTPUT), **(params | {"temperature": 0.0}))
    expected = scores(logits_1V, steps).argmax(dim=-1).tolist()
    assert sample_rows(logits_1V, [make_row(greedy, 0, list(TOKENS))]).tokens == expected


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "params", [{"top_p": 0.9}, {"top_p": 0.3}, {"top_p": 0.999}, {"min_p": 0.2, "top_p": 0.95}], ids=str
)
def test_a_nucleus_wider_than_the_candidates_equals_transformers(params: dict[str, float]) -> None:
    """Nearly flat logits: some of these nuclei hold more than NUCLEUS_CANDIDATES tokens."""
    logits_1V = 0.3 * random_logits(1, 2 * NUCLEUS_CANDIDATES, seed=4)
    check_draws(logits_1V, warped(**params)(logits_1V), **params)


def test_a_nucleus_is_a_share_of_what_min_p_keeps_also_where_that_is_much() -> None:
    """More than NUCLEUS_CANDIDATES tokens pass min-p, and half of their probability is among fewer."""
    logits_1V = 0.5 * random_logits(1, 2 * NUCLEUS_CANDIDATES, seed=4)
    shares_V = torch.softmax(logits_1V[0], dim=-1).sort().values
    params = {"min_p": float(shares_V[NUCLEUS_CANDIDATES // 2] / shares_V[-1]), "top_p": 0.5}
    passing = int(torch.isfinite(warped(min_p=params["min_p"])(logits_1V)).sum())
    assert NUCLEUS_CANDIDATES < passing < 2 * NUCLEUS_CANDIDATES
    check_draws(logits_1V, warped(**params)(logits_1V), **params)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("seed", [42, -(2**63), -1, 0, 2**63 - 1])
def test_draws_along_a_sequence_follow_the_softmax_with_any_seed(seed: int) -> None:
    logits_V = random_logits(1, seed=9)[0]
    rows = [draw(position, seed=seed) for position in range(NUM_DRAWS)]
    assert_drawn_from(sample(logits_V.expand(NUM_DRAWS, -1), rows), torch.softmax(logits_V, dim=-1))


def mixed_rows() -> list[Draw]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_k": 7},
        {"top_p": 0.6},
        {"top_k": 9, "top_p": 0.9, "temperature": 1.7},
        {"min_tokens": 3, "eos_token_ids": frozenset({1, 2})},
    ]
    return [draw(index, seed=index * 77 - 500, **kinds[index % len(kinds)]) for index in range(48)]


def test_a_row_draws_the_same_token_in_any_batch_and_however_many_draw_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Wide enough that some nuclei are settled among the candidates and others are not.
    logits_RV = 0.5 * random_logits(48, 3 * NUCLEUS_CANDIDATES)
    rows = mixed_rows()
    together = sample(logits_RV, rows)
    assert len(set(together)) > 30
    order = torch.randperm(48, generator=torch.Generator().manual_seed(1)).tolist()
    assert sample(logits_RV[order], [rows[i] for i in order]) == [together[i] for i in order]
    monkeypatch.setattr(sampler, "LEAST_DRAWN_AT_ONCE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for at_once in (1, 5, 47):
        monkeypatch.setattr(sampler, "DRAWN_AT_ONCE", at_once * 3 * NUCLEUS_CANDIDATES + 1)
        assert sample(logits_RV, rows) == together


def test_uniforms_are_a_function_of_seed_sequence_and_position_that_never_changes() -> None:
    """Another version of this software must continue a replayed request with the same numbers."""
    seeds = [seed for seed in range(-150, 150) for _ in range(300)]
    positions = list(range(300)) * 300
    first = uniforms(seeds, positions)
    assert np.array_equal(first[::-1], uniforms(seeds[::-1], positions[::-1]))
    assert len(np.unique(first)) == len(first)
    assert not np.any(first == uniforms(seeds, positions, sequence_index=1))
    assert 0.0 <= first.min() <= first.max() < 1.0
    expected = [0.33805245419550545, 0.37838024713282614, 0.9209689088045955]
    assert uniforms([0, 1, -(2**63)], [0, 7, 2**31]).tolist() == expected


def test_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    grid = uniforms([s for s in range(500) for _ in range(500)], list(range(500)) * 500).reshape(500, 500)
    bound = 4 / grid.size**0.5
    off_diagonal = ~np.eye(500, dtype=bool)
    shifted = [np.roll(grid, shift, axis=(0, 1)) for shift in ((1, 0), (0, 1), (1, -1))]
    for other in (*shifted, grid.T):
        assert abs(np.corrcoef(grid[off_diagonal], other[off_diagonal])[0, 1]) < bound


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_no_temperature_takes_the_likeliest(temperature: float) -> None:
    logits_RV = random_logits(9)
    rows = [draw(seed=seed, temperature=temperature, top_p=0.5) for seed in range(9)]
    assert sample(logits_RV, rows) == logits_RV.argmax(dim=-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_temperatures_stay_finite(dtype: torch.dtype) -> None:
    logits_RV = (1000 * random_logits(2)).to(dtype)
    coldest, hottest = sample(logits_RV, [draw(temperature=1e-5), draw(temperature=RANGES["temperature"][1])])
    assert coldest == int(logits_RV[0].argmax())
    assert 0 <= hottest < VOCAB_SIZE


@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 1), (1.0 - 2.0**-53, 3)])
def test_the_ends_of_the_interval_draw_a_token_that_was_kept(
    uniform: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits_V = torch.tensor([0.0, 3.0, 0.0, 2.0, 0.0])
    monkeypatch.setattr(drawing, "uniforms", lambda seeds, *_: np.full((len(seeds), 1), uniform))
    assert sample(logits_V[None], [draw(top_k=2)]) == [expected]


def test_tokens_as_likely_as_the_last_kept_one_stay() -> None:
    rows = torch.tensor([0.0, 3.0, 1.0, 3.0, 3.0]).expand(100, -1)
    for option in ({"top_k": 2}, {"top_p": 0.1}):
        assert set(sample(rows, [draw(seed=seed, **option) for seed in range(100)])) == {1, 3, 4}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ends_are_impossible_below_min_tokens_and_possible_from_there(temperature: float) -> None:
    logits_V = torch.full((VOCAB_SIZE,), -9.0)
    logits_V[[4, 11]] = torch.tensor([20.0, 25.0])
    logits_V[30] = 5.0
    # Ids beyond the vocabulary may be asked for, and never come.
    ends = {"eos_token_ids": frozenset({4}), "stop_token_ids": frozenset({11, 999_999})}
    rows = [draw(num_generated=count, temperature=temperature, min_tokens=3, **ends) for count in range(5)]
    tokens = sample(logits_V.expand(5, -1).clone(), rows)
    assert [token in (4, 11) for token in tokens] == [False] * 3 + [True] * 2


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_flagged_and_spoils_no_other(poison: float) -> None:
    """Even where a mask would hide it. Logits stay as they are."""
    logits_RV = random_logits(48)
    rows = mixed_rows()
    rows[17] = draw(bad_token_ids=frozenset({13}))
    expected = sample(logits_RV, rows)
    poisoned = [*range(6), 17, 40]
    logits_RV[poisoned, 13] = poison
    before_RV = logits_RV.clone()
    tokens = sample(logits_RV, rows)
    assert [index for index, token in enumerate(tokens) if token == FAILED_TOKEN] == poisoned
    assert all(tokens[i] == expected[i] for i in range(48) if i not in poisoned)
    odd = {"logit_bias": ((1, 5.0),), "frequency_penalty": 1.0, "min_p": 0.1, "logprobs": 2}
    sample(logits_RV, [draw(9, num_generated=4, bad_token_ids=frozenset({2}), **odd)] * 48)
    torch.testing.assert_close(logits_RV, before_RV, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": frozenset({VOCAB_SIZE, FAR})},
        {"bad_token_ids": frozenset(range(VOCAB_SIZE))},
        {"allowed_token_ids": frozenset({3}), "bad_token_ids": frozenset({3})},
        {"min_tokens": 1, "stop_token_ids": frozenset(range(VOCAB_SIZE)), "top_p": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_possible_token_fails_alone(temperature: float, params: dict[str, Any]) -> None:
    logits_RV = random_logits(3)
    plain, none_possible = draw(seed=5), draw(temperature=temperature, **params)
    alone = [sample(logits_RV[row : row + 1], [plain])[0] for row in (0, 2)]
    assert sample(logits_RV, [plain, none_possible, plain]) == [alone[0], NO_CHOICE, alone[1]]
    assert sample(torch.empty(0, VOCAB_SIZE), []) == []


def test_a_fork_draws_what_its_outputs_would_draw_alone() -> None:
    logits_1V = random_logits(1)
    rows = [make_row(draw(6, seed=11, n=n, logprobs=0), number) for number, n in enumerate((16, 1, 3))]
    drawn = sample_rows(logits_1V.expand(3, -1), rows)
    alone = [
        sample_rows(logits_1V, [make_row(draw(6, seed=11), 0, index=index)]).tokens[0] for index in range(16)
    ]
    assert drawn.tokens == alone[:1] * 3
    assert [list(drawn.extras[row].tokens) for row in range(3)] == [alone[1:16], [], alone[1:3]]
    assert [len(drawn.extras[row].logprobs) for row in range(3)] == [16, 1, 3]
    assert len(set(alone)) > 4


def test_outputs_of_a_fork_are_independent_draws() -> None:
    logits_1V = random_logits(1, seed=2)
    rows = [make_row(draw(6, seed=seed, n=4), seed) for seed in range(1500)]
    drawn = sample_rows(logits_1V.expand(1500, -1), rows)
    expected_V = torch.softmax(logits_1V[0], dim=-1)
    for output in range(3):
        assert_drawn_from([drawn.extras[row].tokens[output] for row in range(1500)], expected_V)
    pairs = [drawn.tokens[row] * VOCAB_SIZE + drawn.extras[row].tokens[0] for row in range(1500)]
    assert_drawn_from(pairs, torch.outer(expected_V, expected_V).flatten())
