"""Draw of one token for each row: temperature, min-p, top-k, top-p, and counter-based random numbers.

Output (seed, index of the sequence, position) always draws the same uniform number, so a request replayed on another
worker continues with the same draws. The token is where that number falls in the cumulative distribution, in the order
of token ids. What a row draws depends on its own logits and parameters only, never on the other rows.

All filters are one threshold a row on its probabilities after temperature (kernels/torch/nucleus.py). The threshold is
a share of the largest, the k-th largest, or the smallest within top-p.

Shapes: D rows that draw, V vocabulary, N outputs a row (1, or more where one forks), M rows with min-p, F rows with
top-k or top-p.
"""

import numpy as np
import numpy.typing as npt
import torch
from blockyard.kernels.interface import Draws
from blockyard.kernels.torch.nucleus import NUCLEUS_CANDIDATES, NucleusSearch, thresholds
from blockyard.worker.memory.transfers import upload
from blockyard.worker.sampling.state import Batch, Ids

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(
    seeds: npt.ArrayLike, positions: npt.ArrayLike, sequence_index: npt.ArrayLike = 0
) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, position, index), broadcast against each other.

    A SplitMix64 stream over positions from a mixed seed. Seeds of either sign are taken modulo 2^64. Source: Steele,
    Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    seed = np.atleast_1d(np.asarray(seeds)).astype(np.uint64)
    position = np.atleast_1d(np.asarray(positions)).astype(np.uint64)
    index = np.atleast_1d(np.asarray(sequence_index)).astype(np.uint64)
    state = _mix(_mix(seed + _GOLDEN) + index * _GOLDEN)
    bits = _mix(state + (position + np.uint64(1)) * _GOLDEN)
    high_bits: npt.NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64)
    return high_bits * 2.0**-53


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def draw(logits_DV: torch.Tensor, batch: Batch, rows_D: Ids, nuclei: NucleusSearch) -> torch.Tensor:
    """Return tokens [D, N] of the batch's rows `rows_D`, from their logits in fp32.

    Rows with NaN or +inf get any token. Waits for the device only if `nuclei` do.
    """
    device, vocab_size = logits_DV.device, logits_DV.shape[1]
    weights_DV = _weights(logits_DV, batch, rows_D)
    top_k_D = _drop_by_min_p(weights_DV, batch, rows_D)
    rows_F = np.flatnonzero(has_filter(batch, rows_D, vocab_size))
    if len(rows_F):
        index_F = upload(rows_F, device)
        weights_FV = weights_DV[index_F]
        least_F = _least_kept(weights_FV, top_k_D[index_F], batch, rows_D[rows_F], nuclei)
        weights_DV[index_F] = weights_FV.masked_fill(weights_FV < least_F[:, None], 0.0)
    cumulative_DV = weights_DV.cumsum(dim=-1, dtype=torch.float64)
    total_D1 = cumulative_DV[:, -1:]
    uniform_DN = upload(_uniforms_of(batch, rows_D), device)
    # Strictly below the total, however the product is rounded, so that the token found always has a weight.
    below_total_D1 = torch.nextafter(total_D1, torch.zeros_like(total_D1))
    target_DN = torch.minimum(uniform_DN * total_D1, below_total_D1)
    return torch.searchsorted(cumulative_DV, target_DN, right=True).clamp_(max=vocab_size - 1)


def draw_unfiltered(
    logits_SV: torch.Tensor, greedy_S: torch.Tensor, batch: Batch, rows_D: Ids, draws: Draws
) -> torch.Tensor:
    """Return what `draw` does, but for the rounding of the weights, for rows without top-k and top-p."""
    device = logits_SV.device
    return draws.from_logits(
        logits_SV,
        greedy_S,
        upload(rows_D, device),
        batch.column("temperature", rows_D, device).squeeze(1),
        batch.column("min_p", rows_D, device).squeeze(1),
        upload(_uniforms_of(batch, rows_D), device),
    )


def draw_filtered(
    logits_FV: torch.Tensor, batch: Batch, rows_F: Ids, nuclei: NucleusSearch, draws: Draws
) -> torch.Tensor:
    """Return what `draw` does for rows with top-k or top-p."""
    weights_FV = _weights(logits_FV, batch, rows_F)
    top_k_F = _drop_by_min_p(weights_FV, batch, rows_F)
    least_F = _least_kept(weights_FV, top_k_F, batch, rows_F, nuclei)
    return draws.from_weights(weights_FV, least_F, upload(_uniforms_of(batch, rows_F), logits_FV.device))


def has_filter(batch: Batch, rows_D: Ids, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Return which of the batch's rows `rows_D` have top-k or top-p."""
    params_D = batch.params_S[rows_D]
    filtered_D: npt.NDArray[np.bool_] = (params_D["top_k"] < vocab_size) | (params_D["top_p"] < 1.0)
    return filtered_D


def _weights(logits_DV: torch.Tensor, batch: Batch, rows_D: Ids) -> torch.Tensor:
    temperature_D1 = batch.column("temperature", rows_D, logits_DV.device)
    # The largest becomes 0 before the division: a tiny temperature would otherwise make it infinite.
    shifted_DV = (logits_DV - logits_DV.amax(dim=-1, keepdim=True)).div_(temperature_D1)
    return torch.softmax(shifted_DV, dim=-1)


def _uniforms_of(batch: Batch, rows_D: Ids) -> npt.NDArray[np.float64]:
    """Return numbers [D, N]. A row that forks counts its outputs from 0. Any other row takes its sequence's index."""
    num_outputs_D1 = batch.num_outputs_S[rows_D][:, None]
    output_1N = np.arange(batch.num_columns)[None]
    index_DN = np.where(num_outputs_D1 > 1, output_1N, batch.params_S["index"][rows_D][:, None])
    seed_D1 = batch.params_S["seed"][rows_D][:, None]
    return uniforms(seed_D1, batch.positions_S[rows_D][:, None], index_DN)


def _drop_by_min_p(weights_DV: torch.Tensor, batch: Batch, rows_D: Ids) -> torch.Tensor:
    """Set to 0, in place, what min-p leaves out, and return each row's top-k [D].

    Min-p keeps the most probable tokens, so to top-k and top-p it is a smaller k.
    """
    vocab_size, device = weights_DV.shape[1], weights_DV.device
    params_D = batch.params_S[rows_D]
    top_k_D = upload(params_D["top_k"].copy(), device)
    rows_M = np.flatnonzero(params_D["min_p"] > 0)
    if len(rows_M):
        index_M = upload(rows_M, device)
        weights_MV = weights_DV[index_M]
        least_M1 = weights_MV.amax(dim=-1, keepdim=True) * batch.column("min_p", rows_D[rows_M], device)
        dropped_MV = weights_MV < least_M1
        weights_DV[index_M] = weights_MV.masked_fill_(dropped_MV, 0.0)
        top_k_D[index_M] = torch.minimum(top_k_D[index_M], vocab_size - dropped_MV.sum(dim=-1))
    return top_k_D


def _least_kept(
    weights_FV: torch.Tensor, top_k_F: torch.Tensor, batch: Batch, rows_F: Ids, nuclei: NucleusSearch
) -> torch.Tensor:
    """Return the smallest weight [F] that top-k and top-p keep."""
    params_F = batch.params_S[rows_F]
    limits = params_F["top_k"][params_F["top_k"] < weights_FV.shape[1]]
    num_candidates = max(int(limits.max(initial=0)), NUCLEUS_CANDIDATES)
    return thresholds(
        weights_FV,
        top_k_F,
        upload(params_F["top_p"].copy(), weights_FV.device),
        nuclei,
        num_candidates=num_candidates,
        may_be_wide=bool((params_F["top_k"] > num_candidates).any()),
    )
