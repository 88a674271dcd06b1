"""Top-k and top-p of every backend keep the right tokens of many, compared with a sort in exact Python fractions."""

import math
from fractions import Fraction
from itertools import accumulate

import pytest
import torch
from blockyard.kernels.interface import Backend
from blockyard.kernels.torch.nucleus import NucleusSearch, thresholds

from .rig import DEVICE, NAN, seeded

VOCAB_SIZE = 5003
NONE = 2**40
"""A top-k that keeps all, whatever the vocabulary."""


def weights_of(
    num_rows: int, vocab_size: int = VOCAB_SIZE, *, flatness: float = 0.3, seed: int = 0
) -> torch.Tensor:
    return torch.softmax(flatness * torch.randn(num_rows, vocab_size, generator=seeded(seed)), dim=-1)


def expected_threshold(weights_V: torch.Tensor, top_k: int, top_p: float) -> float:
    """Return the threshold by definition: the last of the k largest with less than p of their sum before it."""
    largest = [Fraction(weight) for weight in sorted(weights_V.tolist(), reverse=True)[:top_k]]
    total = sum(largest) if top_k < len(weights_V) else 1
    before = accumulate(largest, initial=Fraction(0))
    kept = [weight for weight, mass in zip(largest, before, strict=False) if mass < Fraction(top_p) * total]
    return float(kept[-1])


def expected_thresholds(weights_FV: torch.Tensor, filters: list[tuple[int, float]]) -> list[float]:
    return [expected_threshold(weights_V, *each) for weights_V, each in zip(weights_FV, filters, strict=True)]


def settled(
    backend: Backend,
    weights_FV: torch.Tensor,
    filters: list[tuple[int, float]],
    pending: list[bool] | None = None,
) -> list[float]:
    """NaN where nothing was written. The weights are on the device already."""
    device, vocab_size = weights_FV.device, weights_FV.shape[1]
    threshold_F = torch.full((len(filters),), NAN, device=device)
    top_k_F = torch.tensor([min(top_k, vocab_size) for top_k, _ in filters], device=device)
    top_p_F = torch.tensor([top_p for _, top_p in filters], dtype=torch.float64, device=device)
    pending_F = torch.tensor(pending or [True] * len(filters), device=device)
    backend.top_k_top_p_thresholds(weights_FV, top_k_F, top_p_F, pending_F, threshold_F)
    return threshold_F.tolist()


FILTERS = [
    (NONE, 0.9),
    (2000, 1.0),
    (3000, 0.7),
    (NONE, 0.999),
    (1, 0.5),
    (NONE, 1e-9),
    (VOCAB_SIZE - 1, 0.25),
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("vocab_size", [1, 63, 4095, 4096, 4097, VOCAB_SIZE])
def test_a_threshold_is_the_smallest_weight_that_is_kept(backend: Backend, vocab_size: int) -> None:
    weights_FV = weights_of(len(FILTERS), vocab_size)
    assert settled(backend, weights_FV.to(DEVICE), FILTERS) == expected_thresholds(weights_FV, FILTERS)


def test_rows_may_lie_apart_and_only_unsettled_ones_are_written(backend: Backend) -> None:
    apart = torch.full((4, VOCAB_SIZE + 5), NAN, device=DEVICE)
    apart[:, :VOCAB_SIZE] = weights_of(4, seed=1).to(DEVICE)
    weights_FV = apart[:, :VOCAB_SIZE]
    found = settled(backend, weights_FV, [(NONE, 0.8)] * 4, [False, True, False, True])
    assert [math.isnan(value) for value in found] == [True, False, True, False]
    assert found[1::2] == expected_thresholds(weights_FV[1::2].cpu(), [(NONE, 0.8)] * 2)


def test_rows_of_few_large_or_equal_weights_and_of_nan_are_settled_side_by_side(backend: Backend) -> None:
    """Equals stay together, subnormal weights count, and a threshold may lie far below the largest weight.

    All sums are exact in fp64. NaN harms no other row.
    """
    weights_FV = torch.zeros(10, VOCAB_SIZE)
    weights_FV[0, :4] = 0.25  # three of them are three quarters
    weights_FV[1, 7] = 1.0
    weights_FV[2] = 1 / VOCAB_SIZE
    weights_FV[3, :3] = torch.tensor([3e-40, 2e-40, 1e-40])  # less than what fp32 has in full precision
    weights_FV[4, ::2] = NAN
    places = torch.randperm(VOCAB_SIZE, generator=seeded(3))[:52]
    weights_FV[5:, places] = 0.5 ** torch.arange(1.0, 53.0)
    filters = [(NONE, 0.7), (2500, 1.0), (NONE, 0.5), (3, 0.9), (2000, 0.9)]
    filters += [(NONE, 1 - 2.0**-40), (NONE, 0.5), (45, 1.0), (45, 0.999), (NONE, 1 - 2.0**-28)]
    found = settled(backend, weights_FV.to(DEVICE), filters)
    del found[4]
    assert found[:4] == [0.25, 1.0, weights_FV[2, 0].item(), weights_FV[3, 2].item()]
    assert found[4:] == [2.0**-40, 0.5, 2.0**-45, 2.0**-10, 2.0**-28]
    rows = [row for row in range(10) if row != 4]
    assert found == expected_thresholds(weights_FV[rows], [filters[row] for row in rows])


@pytest.mark.parametrize("may_be_wide", [False, True])
def test_what_the_candidates_tell_needs_no_settling(backend: Backend, may_be_wide: bool) -> None:
    """A narrow nucleus beside a wide one, whose threshold the candidates cannot tell."""
    weights_FV = torch.cat((weights_of(1, flatness=9.0), weights_of(1)))
    found_F = thresholds(
        weights_FV.to(DEVICE),
        torch.tensor([VOCAB_SIZE, VOCAB_SIZE], device=DEVICE),
        torch.tensor([0.9, 0.9], dtype=torch.float64, device=DEVICE),
        NucleusSearch(find=backend.top_k_top_p_thresholds),
        num_candidates=1024,
        may_be_wide=may_be_wide,
    ).tolist()
    expected = [expected_threshold(weights_V, NONE, 0.9) for weights_V in weights_FV]
    assert found_F[0] == expected[0]
    assert (found_F[1] == expected[1]) == may_be_wide


def test_a_backend_that_settles_all_needs_no_candidates(backend: Backend) -> None:
    weights_FV = weights_of(2)
    filters = [(NONE, 0.9), (3, 0.5)]
    found_F = thresholds(
        weights_FV.to(DEVICE),
        torch.tensor([VOCAB_SIZE, 3], device=DEVICE),
        torch.tensor([0.9, 0.5], dtype=torch.float64, device=DEVICE),
        NucleusSearch(find=backend.top_k_top_p_thresholds, all_rows=True),
        num_candidates=1,
        may_be_wide=False,
    )
    assert found_F.tolist() == expected_thresholds(weights_FV, filters)
