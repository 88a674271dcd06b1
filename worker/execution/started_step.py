"""Started step: a step of a torch runner that has begun, and its results on the host.

Shapes: Q positions whose hidden states are wanted, L chunks of prompts, E embeddings, H hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from blockyard.proto.naming.pooling import Pooling
from blockyard.worker.lora.device_slots import AdapterLoad
from blockyard.worker.memory.transfers import Readback, upload
from blockyard.worker.sampling.divided_drawing import DividedDrawing
from blockyard.worker.sampling.sampler import Drawing
from blockyard.worker.sequences.sequence import TokenLogprob
from blockyard.worker.sequences.step_plan import FAILED_TOKEN, NO_TOKEN, RowExtras, ScheduledRow, StepTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """Rows that compute a chunk of a prompt and do not sample, and which of them gave finite values."""

    rows: tuple[int, ...]
    is_finite: Readback

    @classmethod
    def look_at(cls, last_positions: Mapping[int, int], hidden_QH: torch.Tensor) -> Self:
        """Check that the hidden state of each row's last position is finite.

        It attends to all positions before it, so NaN in any of their keys or values reaches it.

        `last_positions` gives the index of that state in Q, by index of the row.
        """
        last_LH = hidden_QH[upload(list(last_positions.values()), hidden_QH.device)]
        is_finite_L = torch.isfinite(last_LH).all(dim=-1)
        return cls(rows=tuple(last_positions), is_finite=Readback(is_finite_L))

    def spoilt(self) -> frozenset[int]:
        """Return the rows with NaN or infinity. Other sequences may find nothing that was computed on top of these."""
        is_finite: list[bool] = self.is_finite.wait().tolist()
        return frozenset(row for row, finite in zip(self.rows, is_finite, strict=True) if not finite)


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """Rows whose last position gives a prompt's embedding, and the embeddings."""

    rows: tuple[int, ...]
    values: Readback

    @classmethod
    def pool(cls, last_positions: Mapping[int, int], hidden_QH: torch.Tensor, pooling: Pooling) -> Self:
        """Make embeddings of hidden states. `last_positions` gives the index of each in Q, by index of the row."""
        last_EH = hidden_QH[upload(list(last_positions.values()), hidden_QH.device)].float()
        pooled_EH = torch.nn.functional.normalize(last_EH, dim=-1) if pooling.normalizes else last_EH
        return cls(rows=tuple(last_positions), values=Readback(pooled_EH))

    def by_row(self) -> dict[int, bytes]:
        values_EH = self.values.wait().numpy().astype("<f4", copy=False)
        return {row: values_H.tobytes() for row, values_H in zip(self.rows, values_EH, strict=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedStep:
    """A step that has begun, with its results on their way to the host. Implements `PendingStep`."""

    rows: tuple[ScheduledRow, ...]
    drawing: Drawing | DividedDrawing | None
    chunks: Chunks | None
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]]
    embeddings: Embeddings | None = None
    loads: Sequence[AdapterLoad] = ()
    """The adapters that the step has loaded."""

    @torch.inference_mode()
    def result(self) -> StepTokens:
        sampled = StepTokens(tokens=[]) if self.drawing is None else self.drawing.result()
        spoilt = frozenset[int]() if self.chunks is None else self.chunks.spoilt()
        step = _by_row_of_plan(self.rows, sampled, self.prompt_logprobs, spoilt)
        for row, embedding in ({} if self.embeddings is None else self.embeddings.by_row()).items():
            step.extras[row] = RowExtras(embedding=embedding)
        if self.loads:
            step = replace(step, adapter_seconds={load.fingerprint: load.seconds() for load in self.loads})
        return step


def _by_row_of_plan(
    rows: Sequence[ScheduledRow],
    sampled: StepTokens,
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]],
    spoilt: frozenset[int],
) -> StepTokens:
    """Return the results of the rows that sample, at their indices among all rows."""
    sampled_rows = [index for index, row in enumerate(rows) if row.samples]
    tokens = [FAILED_TOKEN if index in spoilt else NO_TOKEN for index in range(len(rows))]
    for row_index, token in zip(sampled_rows, sampled.tokens, strict=True):
        tokens[row_index] = token
    extras = {sampled_rows[index]: extra for index, extra in sampled.extras.items()}
    for index, scores in prompt_logprobs.items():
        if scores:
            extras[index] = replace(extras.get(index, RowExtras()), prompt_logprobs=scores)
    return StepTokens(tokens=tokens, extras=extras)
