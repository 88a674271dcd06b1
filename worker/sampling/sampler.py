"""Sampler: logits to tokens, for all rows of a step at once.

The order is vLLM V1's (`sampler.py`), except that a grammar's mask does not change the logprobs:

- logprobs and beams' candidates, from the model's own logits (logprobs.py)
- the grammar's mask; allowed and bad tokens, min_tokens, bias; repetition, frequency, presence (logit_edits.py)
- the argmax where the temperature is 0
- otherwise temperature; min-p; top-k; top-p among what is left; the draw (draw.py)

A row's token depends on its own logits and parameters only, never on the other rows. Owns no stop conditions.

Shapes: S rows that sample, V vocabulary, N outputs a row (1, or more where one forks), D rows that draw, L rows that
report logprobs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from blockyard.kernels.interface import Draws, greedy_tokens
from blockyard.kernels.torch.nucleus import BY_SORTING, NucleusSearch
from blockyard.worker.memory.transfers import Readback, upload
from blockyard.worker.sampling.draw import draw, draw_filtered, draw_unfiltered, has_filter
from blockyard.worker.sampling.logit_edits import IMPOSSIBLE, edit, has_edits
from blockyard.worker.sampling.logprobs import candidates, token_logprobs
from blockyard.worker.sampling.state import NO_LOGPROBS, Batch, Ids, InFlight, SamplingState
from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.sampling_params import GREEDY_BELOW_TEMPERATURE
from blockyard.worker.sequences.sequence import TokenLogprob
from blockyard.worker.sequences.step_plan import FAILED_TOKEN, NO_CHOICE, RowExtras, ScheduledRow, StepTokens

DRAWN_AT_ONCE = 2**18
"""Logits drawn at once on a CPU, so that their intermediate values stay in its caches."""
LEAST_DRAWN_AT_ONCE = 8
"""Least rows drawn at once on a CPU. Its threads divide a search by rows."""

GreedyTokens = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""The type of `Backend.greedy_tokens`."""
ApplyMasks = Callable[[torch.Tensor, Sequence[ScheduledRow]], None]
"""Makes tokens impossible in logits [S, V], in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Tokens drawn for the rows of a step: on the device, and on their way to the host."""

    tokens_SN: torch.Tensor
    """FAILED_TOKEN or NO_CHOICE where a row has no token."""
    on_host: Readback
    logits_SV: torch.Tensor | None
    """The model's logits, and the edited ones. None where no row asks for more than tokens."""
    edited_SV: torch.Tensor | None
    batch: Batch

    def result(self) -> StepTokens:
        """Wait for the device, and return the tokens and the other results that rows ask for."""
        tokens: list[list[int]] = self.on_host.wait().tolist()
        extras: dict[int, RowExtras] = {}
        if self.logits_SV is not None and self.edited_SV is not None:
            extras = _extras(self.logits_SV, self.edited_SV, self.tokens_SN, tokens, self.batch)
        return StepTokens(tokens=[row_tokens[0] for row_tokens in tokens], extras=extras)


class Sampler:
    """Chooses the tokens of one runner's sequences. Not thread-safe."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        greedy_tokens: GreedyTokens = greedy_tokens,
        nuclei: NucleusSearch = BY_SORTING,
        draws: Draws | None = None,
    ) -> None:
        self.state = SamplingState(vocab_size, device)
        self._greedy_tokens = greedy_tokens
        self._nuclei = nuclei
        self._draws = draws

    def forget(self, ended: Iterable[SequenceId]) -> None:
        self.state.forget(ended)

    def sample(
        self,
        logits_SV: torch.Tensor,
        rows: Sequence[ScheduledRow],
        *,
        in_flight: InFlight,
        apply_masks: ApplyMasks | None = None,
    ) -> StepTokens:
        """Call `start`, and return its result."""
        if not rows:
            return StepTokens(tokens=[])
        return self.start(logits_SV, rows, in_flight=in_flight, apply_masks=apply_masks).result()

    def start(
        self,
        logits_SV: torch.Tensor,
        rows: Sequence[ScheduledRow],
        *,
        in_flight: InFlight,
        apply_masks: ApplyMasks | None = None,
    ) -> Drawing:
        """Begin to draw the tokens of each row, and what else it asks for. At least one row is given, and all sample.

        The token is FAILED_TOKEN where the logits hold NaN or infinity, and NO_CHOICE where the request leaves no
        token. Do not write `logits_SV` before the result is taken, where a row asks for more than tokens.
        """
        batch = self.state.gather(rows, in_flight)
        edited_SV = self._edited(logits_SV, rows, batch, apply_masks)
        if edited_SV is logits_SV:
            greedy_S, finite_S = self._greedy_tokens(logits_SV)
            usable_S = finite_S
        else:
            greedy_S, _ = self._greedy_tokens(edited_SV)
            finite_S = torch.isfinite(logits_SV.amin(dim=-1)) & torch.isfinite(logits_SV.amax(dim=-1))
            usable_S = finite_S & torch.isfinite(edited_SV.amax(dim=-1))
        tokens_SN = self._choose(edited_SV, greedy_S, batch)
        self.state.note_drawn(batch, tokens_SN[:, 0], usable_S)
        tokens_SN.masked_fill_(~usable_S[:, None], NO_CHOICE).masked_fill_(~finite_S[:, None], FAILED_TOKEN)
        reports = _asks_for_more(batch)
        return Drawing(
            tokens_SN=tokens_SN,
            on_host=Readback(tokens_SN),
            logits_SV=logits_SV if reports else None,
            edited_SV=edited_SV if reports else None,
            batch=batch,
        )

    def _edited(
        self,
        logits_SV: torch.Tensor,
        rows: Sequence[ScheduledRow],
        batch: Batch,
        apply_masks: ApplyMasks | None,
    ) -> torch.Tensor:
        """Return the edited copy, or the same tensor where no row wants a change."""
        is_edited = has_edits(batch)
        if not is_edited and apply_masks is None:
            return logits_SV
        edited_SV = logits_SV.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if apply_masks is not None:
            apply_masks(edited_SV, rows)
        if is_edited:
            edit(edited_SV, batch, self.state)
        return edited_SV

    def _choose(self, logits_SV: torch.Tensor, greedy_S: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return tokens [S, N]. In a row that does not fork, the first counts."""
        tokens_SN = greedy_S[:, None].repeat(1, batch.num_columns)
        drawing = np.flatnonzero(batch.params_S["temperature"] >= GREEDY_BELOW_TEMPERATURE)
        if self._draws is not None:
            self._draw_by_kernels(tokens_SN, logits_SV, greedy_S, batch, drawing, self._draws)
            return tokens_SN
        at_once = _drawn_at_once(logits_SV)
        for first in range(0, len(drawing), at_once):
            rows_D = drawing[first : first + at_once]
            index_D = upload(rows_D, logits_SV.device)
            tokens_SN[index_D] = draw(logits_SV[index_D].float(), batch, rows_D, self._nuclei)
        return tokens_SN

    def _draw_by_kernels(
        self,
        tokens_SN: torch.Tensor,
        logits_SV: torch.Tensor,
        greedy_S: torch.Tensor,
        batch: Batch,
        rows_D: Ids,
        draws: Draws,
    ) -> None:
        """Write the tokens of rows that draw, first those without top-k and top-p."""
        is_filtered_D = has_filter(batch, rows_D, logits_SV.shape[1])
        rows, rows_F = rows_D[~is_filtered_D], rows_D[is_filtered_D]
        if len(rows):
            tokens = draw_unfiltered(logits_SV, greedy_S, batch, rows, draws)
            tokens_SN.index_copy_(0, upload(rows, logits_SV.device), tokens)
        if len(rows_F):
            index_F = upload(rows_F, logits_SV.device)
            tokens = draw_filtered(logits_SV[index_F].float(), batch, rows_F, self._nuclei, draws)
            tokens_SN.index_copy_(0, index_F, tokens)


def _drawn_at_once(logits_SV: torch.Tensor) -> int:
    """Return how many rows to draw at once: all on a GPU, as many as suit the caches and threads of a CPU."""
    if logits_SV.device.type != "cpu":
        return len(logits_SV)
    return max(LEAST_DRAWN_AT_ONCE, torch.get_num_threads(), DRAWN_AT_ONCE // logits_SV.shape[1])


def _asks_for_more(batch: Batch) -> bool:
    params_S = batch.params_S
    more_S = (params_S["num_candidates"] > 0) | (params_S["logprobs"] != NO_LOGPROBS)
    return bool((more_S | (batch.num_outputs_S > 1)).any())


def _extras(
    logits_SV: torch.Tensor,
    edited_SV: torch.Tensor,
    tokens_SN: torch.Tensor,
    tokens: list[list[int]],
    batch: Batch,
) -> dict[int, RowExtras]:
    """Return the extras of those rows that have any and have not failed."""
    params_S = batch.params_S
    has_token_S = np.array([row_tokens[0] >= 0 for row_tokens in tokens])
    beams = np.flatnonzero(has_token_S & (params_S["num_candidates"] > 0)).tolist()
    reporting = np.flatnonzero(has_token_S & (params_S["logprobs"] != NO_LOGPROBS)).tolist()
    forking = np.flatnonzero(has_token_S & (batch.num_outputs_S > 1)).tolist()
    by_beam = _candidates(logits_SV, edited_SV, beams, batch)
    logprobs = _logprobs(logits_SV, tokens_SN, reporting, batch)
    return {
        row: RowExtras(
            tokens=tuple(tokens[row][1 : batch.num_outputs_S[row]]),
            logprobs=logprobs.get(row, ()),
            candidates=by_beam.get(row, ()),
        )
        for row in sorted({*beams, *reporting, *forking})
    }


def _candidates(
    logits_SV: torch.Tensor, edited_SV: torch.Tensor, rows: list[int], batch: Batch
) -> dict[int, tuple[tuple[int, float], ...]]:
    if not rows:
        return {}
    index_L = upload(rows, logits_SV.device)
    possible_LV = edited_SV[index_L] != IMPOSSIBLE
    widths = batch.params_S["num_candidates"][rows].tolist()
    return dict(zip(rows, candidates(logits_SV[index_L], possible_LV, widths), strict=True))


def _logprobs(
    logits_SV: torch.Tensor, tokens_SN: torch.Tensor, rows: list[int], batch: Batch
) -> dict[int, tuple[TokenLogprob, ...]]:
    if not rows:
        return {}
    index_L = upload(rows, logits_SV.device)
    found = token_logprobs(logits_SV[index_L], tokens_SN[index_L])
    num_tokens, num_top = batch.num_outputs_S[rows].tolist(), batch.params_S["logprobs"][rows].tolist()
    return {row: found.of_row(i, num_tokens=num_tokens[i], num_top=num_top[i]) for i, row in enumerate(rows)}
