"""What the sampler does not do: sort where no row filters, and wait for the device before its tokens are asked for."""

from typing import Any

import pytest
import torch
from blockyard.kernels.nucleus import NUCLEUS_CANDIDATES
from blockyard.kernels.triton_backend import TritonBackend
from blockyard.worker.overlap import may_be_in_flight
from blockyard.worker.sampler import Sampler
from blockyard.worker.sequence import SamplingParams, ScheduledRow, StepPlan
from torch.utils._python_dispatch import TorchDispatchMode

from .sampling import Draw, make_row, random_logits

WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "unique"}
"""Operations whose result the host needs at once."""
SORTS = {"sort", "topk", "argsort", "msort", "kthvalue"}
VOCAB_SIZE = 4 * NUCLEUS_CANDIDATES


class Operations(TorchDispatchMode):
    """The names of all operations within it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operations_of(*options: dict[str, Any]) -> set[str]:
    """Of the first and of a later step, up to where the result is asked for, with a GPU's backend."""
    backend = TritonBackend()
    sampler = Sampler(VOCAB_SIZE, torch.device("cpu"), backend.likeliest, backend.settle_nuclei)
    drawn = [SamplingParams(max_tokens=64, seed=index, **option) for index, option in enumerate(options)]
    logits_SV = random_logits(len(options), VOCAB_SIZE)
    rows = [make_row(Draw(params, 7, 2), index) for index, params in enumerate(drawn)]
    seen = Operations()
    for position in (7, 8):
        with seen:
            started = sampler.start(logits_SV, rows, in_flight={})
        tokens = started.result().tokens
        rows = [_next_row(row, token, position) for row, token in zip(rows, tokens, strict=True)]
    return seen.names


def _next_row(row: ScheduledRow, token: int, position: int) -> ScheduledRow:
    row.sequence.tokens.append(token)
    return ScheduledRow(sequence=row.sequence, start=position, num_tokens=1, samples=True)


UNFILTERED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"min_p": 0.2},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.5},
    {"logit_bias": ((3, 1.0),), "bad_token_ids": frozenset({5})},
    {"allowed_token_ids": frozenset({5, 6, 7})},
    {"min_tokens": 20, "eos_token_ids": frozenset({2})},
]


FILTERED: list[dict[str, Any]] = [
    {"top_k": 20},
    {"top_k": 20, "top_p": 0.9},
    {"top_p": 0.9},
    {"top_k": NUCLEUS_CANDIDATES + 1, "top_p": 0.9},
]


def test_nothing_is_sorted_where_no_row_has_top_k_or_top_p() -> None:
    assert not operations_of(*UNFILTERED) & SORTS
    assert operations_of({"top_k": 5}) & SORTS


@pytest.mark.parametrize("option", [*UNFILTERED, *FILTERED], ids=str)
def test_a_step_that_may_be_in_flight_waits_for_nothing(option: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=64, **option)
    assert may_be_in_flight(StepPlan(step=0, rows=(make_row(Draw(params, 7, 2), 0),)))
    assert not operations_of(option, {}) & WAITS


@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_a_nucleus_is_the_same_with_or_without_the_wait(spread: float) -> None:
    """Wide, where all logits are about alike, and narrow."""
    device, settle_nuclei = torch.device("cpu"), TritonBackend().settle_nuclei
    logits_SV = spread * random_logits(8, VOCAB_SIZE)
    params = [SamplingParams(top_p=0.9, top_k=2000 * (seed % 2), seed=seed) for seed in range(8)]
    rows = [make_row(Draw(each, 7, 2), number) for number, each in enumerate(params)]
    waits = Sampler(VOCAB_SIZE, device)
    waits_not = Sampler(VOCAB_SIZE, device, settle_nuclei=settle_nuclei)
    assert waits.sample(logits_SV, rows, in_flight={}) == waits_not.sample(logits_SV, rows, in_flight={})
