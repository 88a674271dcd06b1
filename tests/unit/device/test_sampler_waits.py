"""The sampler does not sort if no row filters, and waits for the device only when its tokens are requested."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from blockyard.kernels.torch.nucleus import (
    NUCLEUS_CANDIDATES,
    FindThresholds,
    NucleusSearch,
    thresholds_by_sorting,
)
from blockyard.kernels.triton.backend import TritonBackend
from blockyard.worker.sampling.sampler import Sampler
from blockyard.worker.scheduling.overlap import may_be_in_flight
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.step_plan import ScheduledRow, StepPlan
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.worker.sampling import Draw, make_row, random_logits
from tests.unit.worker.steps import DEVICE

NUMBER_AT_INDEX = "tensor[index] = number"
WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "unique", "torch.tensor", NUMBER_AT_INDEX}
"""Operations whose result the host needs at once, and those that copy pageable memory to a GPU."""
SORTS = {"sort", "topk", "argsort", "msort", "kthvalue"}
VOCAB_SIZE = 4 * NUCLEUS_CANDIDATES


class Operations(TorchDispatchMode):
    """Adds to `names` all operations within it."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """Adds to `names` the calls within it whose operations on a CPU do not show that a GPU waits for them."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor:
            self._names.add("torch.tensor")
        if func is torch.Tensor.__setitem__ and isinstance(args[2], int | float):
            self._names.add(NUMBER_AT_INDEX)
        return func(*args, **(kwargs or {}))


@contextmanager
def no_wait_allowed() -> Iterator[None]:
    """On a GPU any wait raises, whichever operation hides it."""
    if DEVICE.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def operations_of(*options: dict[str, Any], find_thresholds: FindThresholds | None = None) -> set[str]:
    """Return the operations of a first and a later step of Triton's sampler, without those that wait for the result.

    With `find_thresholds` another function finds the thresholds; it may wait for the device.
    """
    backend = TritonBackend()
    sampler = Sampler(
        VOCAB_SIZE,
        DEVICE,
        backend.greedy_tokens,
        NucleusSearch(find=find_thresholds or backend.top_k_top_p_thresholds),
        backend.draws,
    )
    drawn = [SamplingParams(max_tokens=64, seed=index, **option) for index, option in enumerate(options)]
    logits_SV = random_logits(len(options), VOCAB_SIZE).to(DEVICE)
    rows = [make_row(Draw(params, 7, 2), index) for index, params in enumerate(drawn)]
    names: set[str] = set()
    for position in (7, 8):
        with Operations(names), Calls(names):
            started = sampler.start(logits_SV, rows, in_flight={})
        tokens = started.result().tokens
        rows = [_next_row(row, token, position) for row, token in zip(rows, tokens, strict=True)]
    if find_thresholds is None:
        with no_wait_allowed():  # all kernels are compiled by now
            started = sampler.start(logits_SV, rows, in_flight={})
        started.result()
    return names


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
    {"top_p": 0.9, "min_p": 0.001},
]


def test_nothing_is_sorted_where_no_row_has_top_k_or_top_p() -> None:
    assert not operations_of(*UNFILTERED) & SORTS
    assert operations_of({"top_k": 5}) & SORTS


@pytest.mark.parametrize("option", [*UNFILTERED, *FILTERED], ids=str)
def test_a_step_that_may_be_in_flight_waits_for_nothing(option: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=64, **option)
    assert may_be_in_flight(StepPlan(step=0, rows=(make_row(Draw(params, 7, 2), 0),)))
    assert not operations_of(option, {}) & WAITS


def test_draws_without_top_k_and_top_p_are_those_of_pytorch() -> None:
    """Beside greedy and filtered rows, from the model's logits and from edited ones, one token and several a row."""
    backend = TritonBackend()
    nuclei = NucleusSearch.of(backend)
    options: list[dict[str, Any]] = [
        {"temperature": 0.3},
        {"temperature": 2.0, "min_p": 0.1},
        {"temperature": 0.0},
        {"top_p": 0.9},
        {},
    ]
    logits_SV = random_logits(5, VOCAB_SIZE).to(DEVICE)
    for common in ({}, {"n": 3}, {"bad_token_ids": frozenset({5})}):
        params = [SamplingParams(seed=seed, **option, **common) for seed, option in enumerate(options)]
        rows = [make_row(Draw(each, 7, 0), number) for number, each in enumerate(params)]
        by_kernel = Sampler(VOCAB_SIZE, DEVICE, backend.greedy_tokens, nuclei, backend.draws)
        by_torch = Sampler(VOCAB_SIZE, DEVICE)
        assert by_kernel.sample(logits_SV, rows, in_flight={}) == by_torch.sample(
            logits_SV, rows, in_flight={}
        )


def test_copies_of_pageable_memory_count_as_waits() -> None:
    names: set[str] = set()
    x_S = torch.zeros(3, device=DEVICE)
    with Calls(names):
        x_S[torch.arange(2, device=DEVICE)] = 1.0
        torch.tensor([1, 2], device=DEVICE)
    assert names == {NUMBER_AT_INDEX, "torch.tensor"}


def test_sorting_a_wide_nucleus_does_wait() -> None:
    assert operations_of({"top_p": 0.9}, find_thresholds=thresholds_by_sorting) & WAITS


def test_a_nucleus_is_the_same_with_or_without_the_wait() -> None:
    """Some are narrow and settled by the candidates, and of the others min-p gives some a top-k."""
    settled: list[torch.Tensor] = []
    settle_on_device = TritonBackend().top_k_top_p_thresholds

    def find_thresholds(
        weights_FV: torch.Tensor,
        top_k_F: torch.Tensor,
        top_p_F: torch.Tensor,
        pending_F: torch.Tensor,
        threshold_F: torch.Tensor,
    ) -> None:
        settled.append(torch.stack((pending_F.clone(), top_k_F < VOCAB_SIZE)))
        settle_on_device(weights_FV, top_k_F, top_p_F, pending_F, threshold_F)

    spread_S1 = torch.tensor([0.1, 0.1, 0.1, 2.0])[:, None]
    logits_SV = (spread_S1 * random_logits(4, VOCAB_SIZE)).to(DEVICE)
    params = [SamplingParams(top_p=0.9, min_p=0.4 * (seed in (1, 2)), seed=seed) for seed in range(4)]
    rows = [make_row(Draw(each, 7, 2), number) for number, each in enumerate(params)]
    waits = Sampler(VOCAB_SIZE, DEVICE)
    waits_not = Sampler(VOCAB_SIZE, DEVICE, nuclei=NucleusSearch(find=find_thresholds))
    assert waits_not.sample(logits_SV, rows, in_flight={}) == waits.sample(logits_SV, rows, in_flight={})
    ((pending, has_top_k),) = [each.tolist() for each in settled]
    assert pending == [True, True, True, False]
    assert has_top_k == [False, True, True, False]
