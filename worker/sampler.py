"""From logits to tokens: greedy, temperature, top-k, top-p, for all rows of a step at once.

Randomness is a function, not a state: row (seed, sequence, position) always draws the same uniform number, so
a request replayed on another worker continues with the same draws. The token is where that number falls in
the cumulative distribution, in the order of token ids. What a row draws depends on its own logits and
parameters only, never on the other rows.

Both filters are one threshold a row on its probabilities: the k-th largest, or the smallest of the nucleus.
Tokens as likely as the threshold all stay, so no order among equals has to be invented. Owns no stop
conditions beyond keeping end tokens away before `min_tokens`.

Shapes: R rows, V vocabulary, S rows that draw (temperature > 0), F rows with a filter, W likeliest tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from blockyard.worker.scheduler import FAILED_TOKEN
from blockyard.worker.sequence import SamplingParams

GREEDY_BELOW_TEMPERATURE = 1e-5
# A nucleus is nearly always among this many tokens; only the rows where it is not sort the whole vocabulary.
NUCLEUS_CANDIDATES = 1024

_MASK_64 = 2**64 - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Draw(NamedTuple):
    """What a row needs to get its token beside its logits."""

    params: SamplingParams
    position: int
    """Of the token to be drawn, counted from the start of the prompt."""
    num_generated: int
    """Output tokens before it."""


def sample(logits_RV: torch.Tensor, rows: Sequence[Draw]) -> list[int]:
    """One token a row; FAILED_TOKEN where the logits hold NaN or infinity, or no token is allowed.

    `logits_RV` stays as it is.
    """
    if not rows:
        return []
    lowest_R = logits_RV.amin(dim=-1)
    logits_RV = _without_early_endings(logits_RV, rows)
    usable_R = torch.isfinite(lowest_R) & torch.isfinite(logits_RV.amax(dim=-1))
    if not bool(usable_R.all()):
        logits_RV = logits_RV.masked_fill(~usable_R[:, None], 0.0)
    tokens_R = logits_RV.argmax(dim=-1)
    drawing = [i for i, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW_TEMPERATURE]
    if drawing:
        index_S = torch.tensor(drawing, device=logits_RV.device)
        tokens_R[index_S] = _draw(logits_RV[index_S].float(), [rows[i] for i in drawing])
    tokens: list[int] = tokens_R.masked_fill(~usable_R, FAILED_TOKEN).tolist()
    return tokens


def uniforms(
    seeds: Sequence[int], positions: Sequence[int], *, sequence_index: int = 0
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position): a SplitMix64 stream over positions from a mixed seed.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    seed_S = np.array([seed & _MASK_64 for seed in seeds], dtype=np.uint64)
    position_S = np.array(positions, dtype=np.uint64)
    state_S = _mix(_mix(seed_S + _GOLDEN) + np.uint64(sequence_index * int(_GOLDEN) & _MASK_64))
    bits_S = _mix(state_S + (position_S + np.uint64(1)) * _GOLDEN)
    high_bits_S: npt.NDArray[np.float64] = (bits_S >> np.uint64(11)).astype(np.float64)
    return high_bits_S * 2.0**-53


def _mix(bits_S: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits_S = (bits_S ^ (bits_S >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits_S = (bits_S ^ (bits_S >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits_S ^ (bits_S >> np.uint64(31))


def _without_early_endings(logits_RV: torch.Tensor, rows: Sequence[Draw]) -> torch.Tensor:
    """Logits where end and stop tokens of rows below `min_tokens` are impossible."""
    vocab_size = logits_RV.shape[1]
    masked = [
        (index, token)
        for index, row in enumerate(rows)
        if row.num_generated < row.params.min_tokens
        for token in sorted(row.params.eos_token_ids | row.params.stop_token_ids)
        if 0 <= token < vocab_size
    ]
    if not masked:
        return logits_RV
    row_index, token_index = torch.tensor(masked, device=logits_RV.device).unbind(1)
    logits_RV = logits_RV.clone()
    logits_RV[row_index, token_index] = float("-inf")
    return logits_RV


def _draw(logits_SV: torch.Tensor, rows: Sequence[Draw]) -> torch.Tensor:
    device = logits_SV.device
    temperature_S = torch.tensor([row.params.temperature for row in rows], device=device)
    # The largest becomes 0 before the division, which a tiny temperature would else push to infinity.
    shifted_SV = (logits_SV - logits_SV.amax(dim=-1, keepdim=True)).div_(temperature_S[:, None])
    weights_SV = torch.softmax(shifted_SV, dim=-1)
    _drop_filtered(weights_SV, rows)
    cumulative_SV = weights_SV.cumsum(dim=-1, dtype=torch.float64)
    total_S1 = cumulative_SV[:, -1:]
    seeds, positions = [row.params.seed for row in rows], [row.position for row in rows]
    uniform_S = torch.from_numpy(uniforms(seeds, positions)).to(device)
    # Strictly below the total, whatever the product rounds to: so the token found always has a weight.
    below_total_S1 = torch.nextafter(total_S1, torch.zeros_like(total_S1))
    target_S1 = torch.minimum(uniform_S[:, None] * total_S1, below_total_S1)
    return torch.searchsorted(cumulative_SV, target_S1, right=True).squeeze(1)


def _drop_filtered(weights_SV: torch.Tensor, rows: Sequence[Draw]) -> None:
    """Set to 0, in place, what top-k and then top-p leave out. Rows without either are not touched."""
    vocab_size = weights_SV.shape[1]
    top_ks = [row.params.top_k or vocab_size for row in rows]
    filtered = [i for i, row in enumerate(rows) if top_ks[i] < vocab_size or row.params.top_p < 1.0]
    if not filtered:
        return
    device = weights_SV.device
    index_F = torch.tensor(filtered, device=device)
    top_k_F = torch.tensor([min(top_ks[i], vocab_size) for i in filtered], device=device)
    top_p_F = torch.tensor([rows[i].params.top_p for i in filtered], dtype=torch.float64, device=device)
    widest = max((top_ks[i] for i in filtered if top_ks[i] < vocab_size), default=0)
    weights_FV = weights_SV[index_F]
    threshold_F = _thresholds(weights_FV, top_k_F, top_p_F, max(widest, NUCLEUS_CANDIDATES))
    weights_SV[index_F] = weights_FV.masked_fill(weights_FV < threshold_F[:, None], 0.0)


def _thresholds(
    weights_FV: torch.Tensor, top_k_F: torch.Tensor, top_p_F: torch.Tensor, num_candidates: int
) -> torch.Tensor:
    """The smallest weight each row keeps, looked for among its likeliest tokens first, then among all."""
    vocab_size = weights_FV.shape[1]
    width = min(vocab_size, num_candidates)
    candidates_FW = weights_FV.topk(width, dim=-1).values
    threshold_F, num_kept_F = _smallest_kept(candidates_FW, top_k_F, top_p_F, vocab_size)
    unsettled_F = (num_kept_F == width) & (top_k_F > width)
    if bool(unsettled_F.any()):
        sorted_FV = weights_FV[unsettled_F].sort(dim=-1, descending=True).values
        threshold_F[unsettled_F], _ = _smallest_kept(
            sorted_FV, top_k_F[unsettled_F], top_p_F[unsettled_F], vocab_size
        )
    return threshold_F


def _smallest_kept(
    sorted_FW: torch.Tensor, top_k_F: torch.Tensor, top_p_F: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Threshold and number of the kept among the W likeliest: within k, with less than p before them."""
    width = sorted_FW.shape[1]
    cumulative_FW = sorted_FW.cumsum(dim=-1, dtype=torch.float64)
    mass_of_k_F = cumulative_FW.gather(1, (top_k_F - 1).clamp(max=width - 1)[:, None]).squeeze(1)
    # Without top-k the softmax has already made the total 1.
    total_F = torch.where(top_k_F < vocab_size, mass_of_k_F, 1.0)
    before_FW = F.pad(cumulative_FW[:, :-1], (1, 0))
    within_k_FW = torch.arange(width, device=sorted_FW.device) < top_k_F[:, None]
    num_kept_F = (within_k_FW & (before_FW < (top_p_F * total_F)[:, None])).sum(dim=-1)
    return sorted_FW.gather(1, num_kept_F[:, None] - 1).squeeze(1), num_kept_F
