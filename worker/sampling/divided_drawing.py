"""Divided drawing: the tokens of a step in which some rows take the token of the largest logit.

With several ranks, that token is found without gathering logits (model/decoder.py). The sampler draws the other rows.

Shapes: S rows that sample, N outputs a row, P rows that take the largest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from blockyard.worker.memory.transfers import Readback, upload
from blockyard.worker.sampling.sampler import Drawing
from blockyard.worker.sequences.step_plan import FAILED_TOKEN, StepTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedDrawing:
    """Tokens of all rows of a step: on the device, and on their way to the host."""

    tokens_SN: torch.Tensor
    on_host: Readback
    drawing: Drawing | None
    """The other rows."""
    drawn: Sequence[int]
    """Indices in S of the other rows."""

    @classmethod
    def join(
        cls,
        drawing: Drawing | None,
        drawn: Sequence[int],
        largest: tuple[torch.Tensor, torch.Tensor],
        taking: Sequence[int],
    ) -> Self:
        """Put rows back in their order. `largest` gives tokens [P] and whether their rows are finite, `taking` their
        indices in S."""
        tokens_P, is_finite_P = largest
        num_columns = 1 if drawing is None else drawing.tokens_SN.shape[1]
        tokens_SN = tokens_P.new_empty(len(drawn) + len(taking), num_columns)
        tokens_SN[upload(taking, tokens_P.device)] = tokens_P.masked_fill(~is_finite_P, FAILED_TOKEN)[:, None]
        if drawing is not None:
            tokens_SN[upload(drawn, tokens_P.device)] = drawing.tokens_SN
        return cls(tokens_SN=tokens_SN, on_host=Readback(tokens_SN), drawing=drawing, drawn=drawn)

    def result(self) -> StepTokens:
        extras = {} if self.drawing is None else self.drawing.result().extras
        return StepTokens(
            tokens=[row_tokens[0] for row_tokens in self.on_host.wait().tolist()],
            extras={self.drawn[index]: extra for index, extra in extras.items()},
        )
