"""Which tokens top-k and top-p keep where they are many, of every backend, against a sort in Python's own numbers."""

from fractions import Fraction
from itertools import accumulate

import pytest
import torch
from blockyard.kernels.backend import Backend
from blockyard.kernels.nucleus import thresholds

VOCAB_SIZE = 5003
NONE = VOCAB_SIZE
"""A top-k that keeps all."""


def weights_of(num_rows: int, *, flatness: float = 0.3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(flatness * torch.randn(num_rows, VOCAB_SIZE, generator=generator), dim=-1)


def expected_threshold(weights_V: torch.Tensor, top_k: int, top_p: float) -> float:
    """By the definition: the last of the k largest that has less than p of their sum before it."""
    largest = [Fraction(weight) for weight in sorted(weights_V.tolist(), reverse=True)[:top_k]]
    total = sum(largest) if top_k < VOCAB_SIZE else 1
    before = accumulate(largest, initial=Fraction(0))
    kept = [weight for weight, mass in zip(largest, before, strict=False) if mass < Fraction(top_p) * total]
    return float(kept[-1])


def settled(
    backend: Backend,
    device: torch.device,
    weights_FV: torch.Tensor,
    filters: list[tuple[int, float]],
    unsettled: list[bool],
) -> list[float]:
    """-1 where nothing was written."""
    threshold_F = torch.full((len(filters),), -1.0, device=device)
    top_k_F = torch.tensor([top_k for top_k, _ in filters], device=device)
    top_p_F = torch.tensor([top_p for _, top_p in filters], dtype=torch.float64, device=device)
    backend.settle_nuclei(
        weights_FV.to(device), top_k_F, top_p_F, torch.tensor(unsettled, device=device), threshold_F
    )
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


def test_a_threshold_is_the_smallest_weight_that_is_kept(backend: Backend, device: torch.device) -> None:
    weights_FV = weights_of(len(FILTERS))
    found = settled(backend, device, weights_FV, FILTERS, [True] * len(FILTERS))
    assert found == [
        expected_threshold(weights_V, *each) for weights_V, each in zip(weights_FV, FILTERS, strict=True)
    ]


def test_only_unsettled_rows_are_written(backend: Backend, device: torch.device) -> None:
    weights_FV = weights_of(4, seed=1)
    found = settled(backend, device, weights_FV, [(NONE, 0.8)] * 4, [False, True, False, True])
    expected = [expected_threshold(weights_FV[row], NONE, 0.8) for row in (1, 3)]
    assert found == [-1.0, expected[0], -1.0, expected[1]]


def test_equals_stay_together_and_zeros_are_weights_too(backend: Backend, device: torch.device) -> None:
    weights_FV = torch.zeros(3, VOCAB_SIZE)
    weights_FV[0, :4] = 0.25  # three of them are three quarters
    weights_FV[1, 7] = 1.0
    weights_FV[2] = 1 / VOCAB_SIZE
    filters = [(NONE, 0.7), (2500, 1.0), (NONE, 0.5)]
    found = settled(backend, device, weights_FV, filters, [True] * 3)
    assert found == [0.25, expected_threshold(weights_FV[1], 2500, 1.0), weights_FV[2, 0].item()]


def test_a_row_that_holds_nan_harms_no_other(backend: Backend, device: torch.device) -> None:
    weights_FV = weights_of(3, seed=2)
    weights_FV[1, ::2] = float("nan")
    found = settled(backend, device, weights_FV, [(2000, 0.9)] * 3, [True] * 3)
    assert [found[0], found[2]] == [expected_threshold(weights_FV[row], 2000, 0.9) for row in (0, 2)]


@pytest.mark.parametrize("may_be_wide", [False, True])
def test_what_the_candidates_tell_needs_no_settling(
    backend: Backend, device: torch.device, may_be_wide: bool
) -> None:
    """A narrow nucleus beside a wide one, whose threshold the candidates cannot tell."""
    weights_FV = torch.cat((weights_of(1, flatness=9.0), weights_of(1)))
    found_F = thresholds(
        weights_FV.to(device),
        torch.tensor([NONE, NONE], device=device),
        torch.tensor([0.9, 0.9], dtype=torch.float64, device=device),
        backend.settle_nuclei,
        num_candidates=1024,
        may_be_wide=may_be_wide,
    ).tolist()
    expected = [expected_threshold(weights_V, NONE, 0.9) for weights_V in weights_FV]
    assert found_F[0] == expected[0]
    assert (found_F[1] == expected[1]) == may_be_wide
