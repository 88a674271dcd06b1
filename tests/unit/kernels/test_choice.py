"""The choice of tokens: the largest logit, and draws that follow their definition, whatever the rows hold."""

import math

import numpy as np
import pytest
import torch
from blockyard.kernels.interface import Backend, greedy_tokens
from blockyard.kernels.triton.choosing import CHUNK_TOKENS

from .rig import DEVICE, seeded

VOCABULARIES = [1, 63, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS + 77]
ROUNDING = 1e-6
"""Share of a row's weights by which the rounding of fp32 may move a boundary between tokens."""


def logits_of(num_rows: int, vocab_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (2.0 * torch.randn(num_rows, vocab_size, generator=seeded(vocab_size))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_the_greedy_token_has_the_largest_logit(
    triton_backend: Backend, vocab_size: int, dtype: torch.dtype
) -> None:
    logits_SV = logits_of(3, vocab_size, dtype).to(DEVICE)
    tokens_S, finite_S = triton_backend.greedy_tokens(logits_SV)
    assert torch.equal(logits_SV.gather(1, tokens_S[:, None])[:, 0], logits_SV.amax(dim=-1))
    assert finite_S.tolist() == [True] * 3
    assert tokens_S.dtype == torch.int64


@pytest.mark.parametrize("at", [0, 5, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 60])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_with_a_number_that_is_not_finite_is_found_and_has_some_token(
    triton_backend: Backend, at: int, bad: float
) -> None:
    logits_SV = logits_of(3, CHUNK_TOKENS + 61).to(DEVICE)
    logits_SV[1, at] = bad
    tokens_S, finite_S = triton_backend.greedy_tokens(logits_SV)
    expected_S, expected_finite_S = greedy_tokens(logits_SV)
    assert finite_S.tolist() == expected_finite_S.tolist() == [True, False, True]
    assert tokens_S[::2].tolist() == expected_S[::2].tolist()
    drawn = draw(triton_backend, logits_SV, [0, 1, 2], uniforms=[[0.3], [0.999], [0.6]])
    assert all(
        0 <= token < logits_SV.shape[1]
        for tokens in (*drawn, tokens_S.tolist())
        for token in np.ravel(tokens)
    )


def test_a_row_in_which_every_token_is_forbidden_has_some_token(triton_backend: Backend) -> None:
    logits_SV = torch.full((2, CHUNK_TOKENS + 3), -math.inf, device=DEVICE)
    tokens_S, _ = triton_backend.greedy_tokens(logits_SV)
    drawn = draw(triton_backend, logits_SV, [0, 1], uniforms=[[0.0], [0.9]])
    assert all(0 <= token < logits_SV.shape[1] for token in (*tokens_S.tolist(), *np.ravel(drawn)))


def draw(
    backend: Backend,
    logits_SV: torch.Tensor,
    rows: list[int],
    *,
    uniforms: list[list[float]],
    temperatures: list[float] | None = None,
    min_p: list[float] | None = None,
) -> list[list[int]]:
    assert backend.draws is not None
    tokens_DN = backend.draws.from_logits(
        logits_SV,
        backend.greedy_tokens(logits_SV)[0],
        torch.tensor(rows, device=DEVICE),
        torch.tensor(temperatures or [1.0] * len(rows), device=DEVICE),
        torch.tensor(min_p or [0.0] * len(rows), device=DEVICE),
        torch.tensor(uniforms, dtype=torch.float64, device=DEVICE),
    )
    drawn: list[list[int]] = tokens_DN.tolist()
    return drawn


def assert_by_definition(
    logits_V: torch.Tensor, token: int, *, uniform: float, temperature: float, min_p: float
) -> None:
    """Check that the number falls on the token in the cumulative distribution, up to rounding."""
    weights_V = ((logits_V.double() - logits_V.double().max()) / temperature).exp()
    weights_V[weights_V < min_p * (1 - ROUNDING)] = 0.0
    assert weights_V[token] > 0
    cumulative_V = weights_V.cumsum(0) / weights_V.sum()
    before = cumulative_V[token] - weights_V[token] / weights_V.sum()
    assert before - ROUNDING <= uniform < cumulative_V[token] + ROUNDING


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_a_draw_is_where_its_number_falls_in_the_cumulative_distribution(
    triton_backend: Backend, vocab_size: int, dtype: torch.dtype
) -> None:
    """Rows draw in any order, some of them alone, at any temperature, with min-p or not, several numbers at once."""
    logits_SV = logits_of(5, vocab_size, dtype)
    rows, temperatures, min_p = [4, 0, 2], [0.7, 1.5, 0.01], [0.0, 0.05, 0.0]
    uniforms = [[0.0, 0.31, 0.9999999999999999], [0.5, 0.125, 0.75], [0.999, 0.25, 0.0]]
    drawn = draw(
        triton_backend, logits_SV.to(DEVICE), rows, uniforms=uniforms, temperatures=temperatures, min_p=min_p
    )
    for index, row in enumerate(rows):
        for token, uniform in zip(drawn[index], uniforms[index], strict=True):
            assert_by_definition(
                logits_SV[row], token, uniform=uniform, temperature=temperatures[index], min_p=min_p[index]
            )


def test_a_draw_does_not_depend_on_the_rows_beside_it(triton_backend: Backend) -> None:
    logits_SV = logits_of(6, CHUNK_TOKENS + 500).to(DEVICE)
    uniforms = [[0.1 + 0.15 * row] for row in range(6)]
    together = draw(triton_backend, logits_SV, list(range(6)), uniforms=uniforms)
    for row in range(6):
        assert draw(triton_backend, logits_SV, [row], uniforms=[uniforms[row]]) == [together[row]]


def test_forbidden_tokens_are_never_drawn(triton_backend: Backend) -> None:
    """Also not by a number of almost one, behind which only forbidden tokens lie."""
    logits_SV = torch.full((1, 2 * CHUNK_TOKENS + 9), -math.inf)
    allowed = [7, CHUNK_TOKENS + 2]
    logits_SV[0, allowed] = torch.tensor([1.0, 1.0])
    numbers = [0.0, 0.49, 0.51, 0.9999999999999999]
    drawn = draw(triton_backend, logits_SV.to(DEVICE), [0], uniforms=[numbers])
    assert drawn == [[7, 7, CHUNK_TOKENS + 2, CHUNK_TOKENS + 2]]


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_a_draw_from_weights_is_exactly_that_of_their_cumulative_sum(
    triton_backend: Backend, vocab_size: int
) -> None:
    """Weights are quarters, so that sums in fp64 are exact in any order. Those below the least count as 0."""
    generator = seeded(vocab_size)
    weights_FV = torch.randint(0, 9, (3, vocab_size), generator=generator).float() / 4
    weights_FV[:, vocab_size // 2] = 2.0
    least_F = torch.tensor([0.0, 1.0, 2.0])
    uniform_FN = torch.rand(3, 8, generator=generator, dtype=torch.float64)
    uniform_FN[:, 0], uniform_FN[:, 1] = 0.0, 1 - 2**-53
    assert triton_backend.draws is not None
    tokens_FN = triton_backend.draws.from_weights(
        weights_FV.to(DEVICE), least_F.to(DEVICE), uniform_FN.to(DEVICE)
    )
    kept_FV = weights_FV.masked_fill(weights_FV < least_F[:, None], 0.0).double()
    cumulative_FV = kept_FV.cumsum(-1)
    expected_FN = torch.searchsorted(cumulative_FV, uniform_FN * cumulative_FV[:, -1:], right=True)
    last_weighted_F = (kept_FV > 0).double().cumsum(-1).argmax(-1)
    expected_FN = torch.minimum(expected_FN, last_weighted_F[:, None])
    assert tokens_FN.tolist() == expected_FN.tolist()
