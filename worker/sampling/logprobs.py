"""Log-probabilities: logprobs and ranks of tokens, the most probable tokens, and a beam's candidates.

All come from the model's own logits by log_softmax in fp32: before masks, penalties, temperature and filters. What a
row reports depends on its own logits only, down to the order of tokens of equal probability.

Shapes: L rows, V vocabulary, N tokens a row, W most probable tokens, C candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from blockyard.proto.limits import MAX_LOGPROBS
from blockyard.worker.memory.transfers import upload
from blockyard.worker.sequences.sequence import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLogprobs:
    """Log-probabilities of N tokens in each of L rows, on the host."""

    tokens_LN: list[list[int]]
    logprobs_LN: list[list[float]]
    ranks_LN: list[list[int]]
    top_tokens_LW: list[list[int]]
    top_logprobs_LW: list[list[float]]

    def of_row(self, row: int, *, num_tokens: int, num_top: int) -> tuple[TokenLogprob, ...]:
        """Return the logprobs of the row's first `num_tokens` tokens, each with the row's `num_top` most probable
        ones."""
        most_probable = zip(self.top_tokens_LW[row], self.top_logprobs_LW[row], strict=True)
        top = tuple(most_probable)[:num_top]
        columns = zip(self.tokens_LN[row], self.logprobs_LN[row], self.ranks_LN[row], strict=True)
        return tuple(TokenLogprob(*column, top) for column in columns)[:num_tokens]


def token_logprobs(logits_LV: torch.Tensor, tokens_LN: torch.Tensor) -> BatchLogprobs:
    """Return the log-probabilities and ranks of tokens, and the most probable tokens of each row.

    Always look for the maximum number of most probable tokens: among equals, which ones are found may depend on how
    many are sought.
    """
    logprobs_LV = torch.log_softmax(logits_LV.float(), dim=-1)
    top = logprobs_LV.topk(min(MAX_LOGPROBS, logits_LV.shape[1]), dim=-1)
    chosen_LN = logits_LV.gather(1, tokens_LN)
    # One token of all rows at a time: [L, N, V] may be larger than the device.
    ranks_LN = torch.stack([1 + (logits_LV > chosen_L1).sum(-1) for chosen_L1 in chosen_LN.split(1, 1)], 1)
    return BatchLogprobs(
        tokens_LN=tokens_LN.tolist(),
        logprobs_LN=logprobs_LV.gather(1, tokens_LN).tolist(),
        ranks_LN=ranks_LN.tolist(),
        top_tokens_LW=top.indices.tolist(),
        top_logprobs_LW=top.values.tolist(),
    )


def score(logits_LV: torch.Tensor, tokens: Sequence[int], *, num_top: int) -> tuple[TokenLogprob, ...]:
    """Return the log-probability of one token in each row, with the row's `num_top` most probable ones."""
    if not tokens:
        return ()
    found = token_logprobs(logits_LV, upload(tokens, logits_LV.device)[:, None])
    return tuple(found.of_row(row, num_tokens=1, num_top=num_top)[0] for row in range(len(tokens)))


def candidates(
    logits_LV: torch.Tensor, possible_LV: torch.Tensor, widths: Sequence[int]
) -> list[tuple[tuple[int, float], ...]]:
    """Return the most probable tokens of each row, as many as `widths` says. Impossible ones come last, at minus
    infinity.

    They are excluded after the log_softmax, as in transformers: the others' logprobs stay the model's.
    """
    logprobs_LV = torch.log_softmax(logits_LV.float(), dim=-1).masked_fill(~possible_LV, float("-inf"))
    results: list[tuple[tuple[int, float], ...]] = [()] * len(widths)
    # One search for each width, so that other requests do not change the order among equals.
    for width in sorted(set(widths)):
        rows = [row for row, own in enumerate(widths) if own == width]
        top = logprobs_LV[upload(rows, logits_LV.device)].topk(width, dim=-1)
        for row, tokens, logprobs in zip(rows, top.indices.tolist(), top.values.tolist(), strict=True):
            results[row] = tuple(zip(tokens, logprobs, strict=True))
    return results
