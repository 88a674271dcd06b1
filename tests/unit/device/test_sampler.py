"""The sampler draws the right distribution, the same token for the same row, and no forbidden token."""

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
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests.unit.worker.sampling import VOCAB_SIZE, Draw, assert_drawn_from, random_logits, sample

NUM_DRAWS = 10_000


def draw(position: int = 7, *, num_generated: int = 0, **params: Any) -> Draw:
    return Draw(SamplingParams(max_tokens=64, **params), position, num_generated)


def draw_many(logits_V: torch.Tensor, **params: Any) -> list[int]:
    rows = [draw(seed=seed, **params) for seed in range(NUM_DRAWS)]
    return sample(logits_V.expand(NUM_DRAWS, -1), rows)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits_V = random_logits(1)[0]
    tokens = draw_many(logits_V, temperature=temperature)
    assert_drawn_from(tokens, torch.softmax(logits_V / temperature, dim=-1))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(5, 1.0), (0, 0.8), (12, 0.7), (1, 1.0), (0, 1e-6), (100, 0.95)]
)
def test_draws_follow_transformers_filters(top_k: int, top_p: float) -> None:
    logits_V, temperature = random_logits(1, seed=3)[0], 1.3
    scores = (logits_V / temperature)[None]
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    tokens = draw_many(logits_V, temperature=temperature, top_k=top_k, top_p=top_p)
    expected_V = torch.softmax(scores[0], dim=-1)
    if int((expected_V > 0).sum()) == 1:
        assert set(tokens) == {int(logits_V.argmax())}
    else:
        assert_drawn_from(tokens, expected_V)


@pytest.mark.ci
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_a_nucleus_wider_than_the_candidates_equals_transformers(top_p: float) -> None:
    """Nearly flat logits: some of these nuclei hold more than NUCLEUS_CANDIDATES tokens."""
    logits_V = 0.3 * random_logits(1, 2 * NUCLEUS_CANDIDATES, seed=4)[0]
    kept_V = torch.isfinite(TopPLogitsWarper(top_p)(None, logits_V[None])[0])
    tokens = draw_many(logits_V, top_p=top_p)
    assert bool(kept_V[torch.tensor(tokens)].all())
    assert_drawn_from(tokens, torch.softmax(logits_V.masked_fill(~kept_V, float("-inf")), dim=-1))


@pytest.mark.ci
def test_a_nucleus_is_a_share_of_what_min_p_keeps_also_where_that_is_much() -> None:
    """More than NUCLEUS_CANDIDATES tokens pass min-p, and half of their probability is among fewer."""
    logits_V = 0.5 * random_logits(1, 2 * NUCLEUS_CANDIDATES, seed=4)[0]
    least = float(torch.softmax(logits_V, dim=-1).sort().values[NUCLEUS_CANDIDATES // 2])
    min_p = least / float(torch.softmax(logits_V, dim=-1).max())
    passing_1V = MinPLogitsWarper(min_p)(None, logits_V[None])
    assert NUCLEUS_CANDIDATES < int(torch.isfinite(passing_1V).sum()) < 2 * NUCLEUS_CANDIDATES
    expected_V = torch.softmax(TopPLogitsWarper(0.5)(None, passing_1V)[0], dim=-1)
    tokens = draw_many(logits_V, min_p=min_p, top_p=0.5)
    assert bool((expected_V > 0)[torch.tensor(tokens)].all())
    assert_drawn_from(tokens, expected_V)


@pytest.mark.ci
def test_draws_along_a_sequence_follow_the_softmax_too() -> None:
    logits_V = random_logits(1, seed=9)[0]
    rows = [draw(position, seed=42) for position in range(NUM_DRAWS)]
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


def test_a_row_draws_the_same_token_in_any_batch() -> None:
    # Wide enough that some nuclei are settled among the candidates and others are not.
    logits_RV = 0.5 * random_logits(48, 3 * NUCLEUS_CANDIDATES)
    rows = mixed_rows()
    together = sample(logits_RV, rows)
    assert len(set(together)) > 30
    order = torch.randperm(48, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sample(logits_RV[order], [rows[i] for i in order])
    assert shuffled == [together[i] for i in order]
    assert [sample(logits_RV[i : i + 1], [rows[i]])[0] for i in range(48)] == together


@pytest.mark.parametrize("at_once", [1, 5, 47])
def test_however_many_rows_draw_at_once_each_draws_its_own(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    logits_RV = 0.5 * random_logits(48, 3 * NUCLEUS_CANDIDATES)
    expected = sample(logits_RV, mixed_rows())
    monkeypatch.setattr(sampler, "LEAST_DRAWN_AT_ONCE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(sampler, "DRAWN_AT_ONCE", at_once * 3 * NUCLEUS_CANDIDATES + 1)
    assert sample(logits_RV, mixed_rows()) == expected


@pytest.mark.ci
@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_every_seed_of_64_bits_works(seed: int) -> None:
    logits_V = random_logits(1, seed=6)[0]
    rows = [draw(position, seed=seed) for position in range(NUM_DRAWS)]
    assert_drawn_from(sample(logits_V.expand(NUM_DRAWS, -1), rows), torch.softmax(logits_V, dim=-1))


def test_uniforms_are_a_function_of_seed_sequence_and_position() -> None:
    seeds = [seed for seed in range(-150, 150) for _ in range(300)]
    positions = list(range(300)) * 300
    first = uniforms(seeds, positions)
    assert np.array_equal(first, uniforms(seeds, positions))
    assert np.array_equal(first[::-1], uniforms(seeds[::-1], positions[::-1]))
    assert len(np.unique(first)) == len(first)
    assert not np.any(first == uniforms(seeds, positions, sequence_index=1))
    assert 0.0 <= first.min() <= first.max() < 1.0


def test_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    grid = uniforms([s for s in range(500) for _ in range(500)], list(range(500)) * 500).reshape(500, 500)
    bound = 4 / grid.size**0.5
    off_diagonal = ~np.eye(500, dtype=bool)
    shifted = [np.roll(grid, shift, axis=(0, 1)) for shift in ((1, 0), (0, 1), (1, -1))]
    for other in (*shifted, grid.T):
        assert abs(np.corrcoef(grid[off_diagonal], other[off_diagonal])[0, 1]) < bound


def test_the_draws_of_a_seed_never_change() -> None:
    """Another version of this software must continue a replayed request with the same numbers."""
    expected = [0.33805245419550545, 0.37838024713282614, 0.9209689088045955]
    assert uniforms([0, 1, -(2**63)], [0, 7, 2**31]).tolist() == expected


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


@pytest.mark.ci
def test_tokens_as_likely_as_the_last_kept_one_stay() -> None:
    logits_V = torch.tensor([0.0, 3.0, 1.0, 3.0, 3.0])
    assert set(draw_many(logits_V, top_k=2)) == {1, 3, 4}
    assert set(draw_many(logits_V, top_p=0.1)) == {1, 3, 4}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ends_are_impossible_below_min_tokens_and_possible_from_there(temperature: float) -> None:
    logits_V = torch.full((VOCAB_SIZE,), -9.0)
    logits_V[[4, 11]] = torch.tensor([20.0, 25.0])
    logits_V[30] = 5.0
    # Ids beyond the vocabulary may be asked for, and never come.
    ends = {"eos_token_ids": frozenset({4}), "stop_token_ids": frozenset({11, 999_999})}
    rows = [draw(num_generated=count, temperature=temperature, min_tokens=3, **ends) for count in range(5)]
    before = logits_V.expand(5, -1).clone()
    logits_RV = before.clone()
    tokens = sample(logits_RV, rows)
    assert all(token not in (4, 11) for token in tokens[:3])
    assert all(token in (4, 11) for token in tokens[3:])
    assert torch.equal(logits_RV, before)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_flagged_and_spoils_no_other(poison: float) -> None:
    logits_RV = random_logits(48)
    rows = mixed_rows()
    expected = sample(logits_RV, rows)
    poisoned = [*range(6), 17, 40]
    logits_RV[poisoned, 13] = poison
    tokens = sample(logits_RV, rows)
    assert [index for index, token in enumerate(tokens) if token == FAILED_TOKEN] == poisoned
    assert all(tokens[i] == expected[i] for i in range(48) if i not in poisoned)


def test_a_row_that_forbids_every_token_is_flagged() -> None:
    everything = frozenset(range(VOCAB_SIZE))
    rows = [draw(min_tokens=1, stop_token_ids=everything, top_p=top_p) for top_p in (1.0, 0.5)]
    assert sample(random_logits(2), rows) == [NO_CHOICE] * 2


def test_no_rows_yield_no_tokens() -> None:
    assert sample(torch.empty(0, VOCAB_SIZE), []) == []
