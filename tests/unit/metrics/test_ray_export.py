"""Export of metrics to Ray."""

import pytest
from blockyard.proto.metrics.ray import increase


@pytest.mark.parametrize(
    ("exported", "number", "added"), [(0, 5, 5), (5, 7, 2), (5, 5, 0), (5, 2, 2), (5, 0, 0)]
)
def test_a_counter_that_began_anew_goes_on_from_its_exported_value(
    exported: float, number: float, added: float
) -> None:
    """A model that was removed and added again counts from 0."""
    assert increase(exported, number) == added
