"""Limits that a router and a worker both check: a worker accepts everything that a router lets through."""

import pytest
from blockyard.proto.limits import COUNTS, RANGES
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.session.submits import MAX_LIST

WHOLE_NUMBERS = ("max_tokens", "logprobs", "prompt_logprobs")


@pytest.mark.parametrize(
    ("field", "bound"), [(field, bound) for field, bounds in RANGES.items() for bound in bounds]
)
def test_a_worker_takes_both_ends_of_every_range(field: str, bound: float) -> None:
    value = int(bound) if field in WHOLE_NUMBERS else float(bound)
    assert getattr(SamplingParams(**{field: value}), field) == value  # type: ignore[arg-type]


@pytest.mark.parametrize("field", sorted(RANGES.keys() - WHOLE_NUMBERS))
def test_a_worker_refuses_what_lies_outside(field: str) -> None:
    lowest, highest = RANGES[field]
    for value in (lowest - 0.001, highest + 0.001, float("nan")):
        with pytest.raises(ValueError, match=f"{field} must be from {lowest} to {highest}, not "):
            SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_a_worker_takes_lists_as_long_as_a_router_does() -> None:
    assert {name: MAX_LIST[name] for name in MAX_LIST if name in COUNTS}.items() <= COUNTS.items()
