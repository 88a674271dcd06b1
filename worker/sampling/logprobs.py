"""How likely the model held tokens: logprobs and ranks of tokens, the likeliest tokens, a beam's candidates.

All from the model's own logits, before masks, penalties, temperature and filters, by log_softmax in fp32. What a row
reports depends on its own logits only, down to the order of tokens that are equally likely.

Shapes: L rows, V vocabulary, N tokens a row, W likeliest tokens, C candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from blockyard.proto.limits import MAX_LOGPROBS
from blockyard.worker.sequences.sequence import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihoods:
    """Of N tokens in each of L rows, on the host."""

    tokens_LN: list[list[int]]
    logprobs_LN: list[list[float]]
    ranks_LN: list[list[int]]
    top_tokens_LW: list[list[int]]
    top_logprobs_LW: list[list[float]]

    def of_row(self, row: int, *, num_tokens: int, num_top: int) -> tuple[TokenLogprob, ...]:
        """The row's first tokens, each beside the row's likeliest."""
        likeliest = zip(self.top_tokens_LW[row], self.top_logprobs_LW[row], strict=True)
        top = tuple(likeliest)[:num_top]
        columns = zip(self.tokens_LN[row], self.logprobs_LN[row], self.ranks_LN[row], strict=True)
        return tuple(TokenLogprob(*column, top) for column in columns)[:num_tokens]


def likelihoods(logits_LV: torch.Tensor, tokens_LN: torch.Tensor) -> Likelihoods:
    """Always looks for as many of the likeliest as anyone may ask for: among equals, which of them are found
    may depend on how many are sought."""
    logprobs_LV = torch.log_softmax(logits_LV.float(), dim=-1)
    top = logprobs_LV.topk(min(MAX_LOGPROBS, logits_LV.shape[1]), dim=-1)
    chosen_LN = logits_LV.gather(1, tokens_LN)
    # One token of all rows at a time: [L, N, V] may be larger than the device.
    ranks_LN = torch.stack([1 + (logits_LV > chosen_L1).sum(-1) for chosen_L1 in chosen_LN.split(1, 1)], 1)
    return Likelihoods(
        tokens_LN=tokens_LN.tolist(),
        logprobs_LN=logprobs_LV.gather(1, tokens_LN).tolist(),
        ranks_LN=ranks_LN.tolist(),
        top_tokens_LW=top.indices.tolist(),
        top_logprobs_LW=top.values.tolist(),
    )


def score(logits_LV: torch.Tensor, tokens: Sequence[int], *, num_top: int) -> tuple[TokenLogprob, ...]:
    """Of one token in each row."""
    if not tokens:
        return ()
    tokens_L1 = torch.tensor(tokens, dtype=torch.int64, device=logits_LV.device)[:, None]
    found = likelihoods(logits_LV, tokens_L1)
    return tuple(found.of_row(row, num_tokens=1, num_top=num_top)[0] for row in range(len(tokens)))


def candidates(
    logits_LV: torch.Tensor, possible_LV: torch.Tensor, widths: Sequence[int]
) -> list[tuple[tuple[int, float], ...]]:
    """The likeliest tokens of each row, as many as `widths` says. Impossible ones come last, at minus infinity.

    They lose their chance after the log_softmax, as in transformers: the others' logprobs stay the model's.
    """
    logprobs_LV = torch.log_softmax(logits_LV.float(), dim=-1).masked_fill(~possible_LV, float("-inf"))
    results: list[tuple[tuple[int, float], ...]] = [()] * len(widths)
    # A search for each width, so that no other request's changes the order among equals.
    for width in sorted(set(widths)):
        rows = [row for row, own in enumerate(widths) if own == width]
        top = logprobs_LV[torch.tensor(rows, device=logits_LV.device)].topk(width, dim=-1)
        for row, tokens, logprobs in zip(rows, top.indices.tolist(), top.values.tolist(), strict=True):
            results[row] = tuple(zip(tokens, logprobs, strict=True))
    return results
