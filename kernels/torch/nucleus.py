"""Finds what top-k and top-p keep of a row: all tokens at least as likely as a threshold.

The threshold is nearly always among a few most likely tokens (NUCLEUS_CANDIDATES). Rows where it is not are pending,
and their whole vocabulary is sorted. A backend with a search faster than the candidates uses it for all rows
(`Backend.top_k_top_p_thresholds`): triton/nucleus.py and cpu/native/nucleus.cpp. All tokens as likely as the threshold
stay, so equals need no order.

Shapes: F rows with top-k or top-p, V vocabulary, W most likely tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
import torch.nn.functional as F

NUCLEUS_CANDIDATES = 1024
"""A nucleus nearly always lies among so many most likely tokens."""
FindThresholds = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""The type of `Backend.top_k_top_p_thresholds`."""


def thresholds(
    weights_FV: torch.Tensor,
    top_k_F: torch.Tensor,
    top_p_F: torch.Tensor,
    nuclei: "NucleusSearch",
    *,
    num_candidates: int,
    may_be_wide: bool,
) -> torch.Tensor:
    """Return the smallest weight [F] that each row keeps.

    Weights are fp32 and not negative. A row without top-k has the vocabulary's size as `top_k_F`. Its weights add up to
    one. `may_be_wide` says whether, as far as the host knows, a row may keep more than `num_candidates`. Only then can
    rows be pending, unless the search takes all rows.
    """
    num_rows, vocab_size = weights_FV.shape
    if nuclei.all_rows:
        threshold_F = weights_FV.new_empty(num_rows)
        every_F = torch.ones(num_rows, dtype=torch.bool, device=weights_FV.device)
        nuclei.find(weights_FV, top_k_F, top_p_F, every_F, threshold_F)
        return threshold_F
    width = min(vocab_size, num_candidates)
    candidates_FW = weights_FV.topk(width, dim=-1).values
    threshold_F, num_kept_F = _smallest_kept(candidates_FW, top_k_F, top_p_F, vocab_size)
    if may_be_wide:
        # With a top-k beyond the candidates, they do not give the sum of which top-p is a share.
        pending_F = (top_k_F > width) & ((num_kept_F == width) | (top_k_F < vocab_size))
        nuclei.find(weights_FV, top_k_F, top_p_F, pending_F, threshold_F)
    return threshold_F


def thresholds_by_sorting(
    weights_FV: torch.Tensor,
    top_k_F: torch.Tensor,
    top_p_F: torch.Tensor,
    pending_F: torch.Tensor,
    threshold_F: torch.Tensor,
) -> None:
    """Find thresholds with PyTorch, on any device. Waits for the device, and sorts only if a row is pending."""
    if bool(pending_F.any()):
        sorted_FV = weights_FV[pending_F].sort(dim=-1, descending=True).values
        threshold_F[pending_F], _ = _smallest_kept(
            sorted_FV, top_k_F[pending_F], top_p_F[pending_F], weights_FV.shape[1]
        )


class FindsThresholds(Protocol):
    """The members of `Backend` that a search needs."""

    @property
    def thresholds_all_rows(self) -> bool: ...

    @property
    def top_k_top_p_thresholds(self) -> FindThresholds: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NucleusSearch:
    """The function with which a backend finds thresholds."""

    find: FindThresholds = thresholds_by_sorting
    all_rows: bool = False
    """See `Backend.thresholds_all_rows`."""

    @classmethod
    def of(cls, backend: FindsThresholds) -> Self:
        return cls(find=backend.top_k_top_p_thresholds, all_rows=backend.thresholds_all_rows)


BY_SORTING = NucleusSearch()
"""The search by sorting, which works on any device."""


def _smallest_kept(
    sorted_FW: torch.Tensor, top_k_F: torch.Tensor, top_p_F: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's threshold [F] and number of kept tokens [F]. Of the W most likely tokens, those within k and
    with less than p before them are kept."""
    width = sorted_FW.shape[1]
    cumulative_FW = sorted_FW.cumsum(dim=-1, dtype=torch.float64)
    mass_of_k_F = cumulative_FW.gather(1, (top_k_F - 1).clamp(max=width - 1)[:, None]).squeeze(1)
    # Without top-k the softmax has already made the total 1.
    total_F = torch.where(top_k_F < vocab_size, mass_of_k_F, 1.0)
    before_FW = F.pad(cumulative_FW[:, :-1], (1, 0))
    within_k_FW = torch.arange(width, device=sorted_FW.device) < top_k_F[:, None]
    num_kept_F = (within_k_FW & (before_FW < (top_p_F * total_F)[:, None])).sum(dim=-1)
    # A row that holds NaN keeps none.
    last_kept_F = (num_kept_F - 1).clamp_(min=0)
    return sorted_FW.gather(1, last_kept_F[:, None]).squeeze(1), num_kept_F
