"""The sampler as one call, for rows described by their parameters, and the chi-square test of what it draws."""

import functools
from typing import NamedTuple

import torch
from blockyard.kernels.interface import Backend
from blockyard.kernels.selection import choose_backend
from blockyard.kernels.torch.nucleus import NucleusSearch
from blockyard.worker.sampling.sampler import Sampler
from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import Sequence, token_array
from blockyard.worker.sequences.step_plan import ScheduledRow, StepTokens

VOCAB_SIZE = 40
# Drawing from the right distribution passes with probability 0.9999 (normal approximation of chi-square).
CHI_SQUARE_SIGMAS = 3.72


class Draw(NamedTuple):
    """A row that samples."""

    params: SamplingParams
    position: int
    """Position of the token to be drawn, counted from the start of the prompt."""
    num_generated: int
    """Output tokens before it."""


def make_row(
    draw: Draw, sequence_id: int, tokens: list[int] | None = None, *, index: int = 0
) -> ScheduledRow:
    sequence = Sequence(
        sequence_id=SequenceId(sequence_id),
        tokens=token_array([0] * draw.position if tokens is None else tokens),
        prompt_length=draw.position - draw.num_generated,
        sampling=draw.params,
        names=[],
        index=index,
        num_outputs=draw.params.n if draw.num_generated == 0 and not draw.params.beam_width else 1,
    )
    return ScheduledRow(sequence=sequence, start=draw.position - 1, num_tokens=1, samples=True)


@functools.cache
def backend(device: torch.device) -> Backend:
    """The one that serves there: on most CPUs it finds the most likely token and nuclei itself."""
    return choose_backend(device)


def sample_rows(logits_SV: torch.Tensor, rows: list[ScheduledRow]) -> StepTokens:
    """The same by PyTorch alone and with the backend's own search."""
    device = logits_SV.device
    sampled = Sampler(logits_SV.shape[1], device).sample(logits_SV, rows, in_flight={})
    own = backend(device)
    sampler = Sampler(logits_SV.shape[1], device, own.greedy_tokens, NucleusSearch.of(own))
    assert sampler.sample(logits_SV, rows, in_flight={}) == sampled
    return sampled


def sample(logits_SV: torch.Tensor, draws: list[Draw]) -> list[int]:
    rows = [make_row(draw, sequence_id) for sequence_id, draw in enumerate(draws)]
    return sample_rows(logits_SV, rows).tokens


def random_logits(rows: int, vocab_size: int = VOCAB_SIZE, *, seed: int = 0) -> torch.Tensor:
    return 2.0 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def assert_drawn_from(tokens: list[int], expected_V: torch.Tensor) -> None:
    """Chi-square test of the tokens' counts, with tokens of small expectation pooled into one class."""
    counts_V = torch.bincount(torch.tensor(tokens), minlength=len(expected_V)).double()
    assert float(counts_V[expected_V == 0].sum()) == 0, "drew what the filter leaves out"
    wanted_V = expected_V.double() * len(tokens)
    rare_V = wanted_V < 8
    wanted = torch.cat((wanted_V[~rare_V], wanted_V[rare_V].sum()[None]))
    counts = torch.cat((counts_V[~rare_V], counts_V[rare_V].sum()[None]))
    wanted, counts = wanted[wanted > 0], counts[wanted > 0]
    statistic = float(((counts - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    print(f"chi-square {statistic:.1f} at {freedom} degrees of freedom")
    # Wilson and Hilferty: the cube root of chi-square / freedom is nearly normal.
    spread = 2 / (9 * freedom)
    assert ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5 < CHI_SQUARE_SIGMAS
