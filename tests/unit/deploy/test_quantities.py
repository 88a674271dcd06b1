"""Numbers in the form that people read."""

import pytest
from blockyard.deploy.views.quantities import counted, format_bytes, short_decimal


@pytest.mark.parametrize(
    ("count", "told"), [(0, "0 workers"), (1, "1 worker"), (2, "2 workers"), (1024, "1,024 workers")]
)
def test_one_is_singular(count: int, told: str) -> None:
    assert counted(count, "worker") == told


@pytest.mark.parametrize(("count", "told"), [(1.0, "1 CPU"), (0.5, "0.5 CPUs"), (2.0, "2 CPUs")])
def test_shares_are_counted_as_well(count: float, told: str) -> None:
    assert counted(count, "CPU") == told


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**30 - 2**14, "1.0 GiB"),
        (1023.9 * 2**20, "1023.9 MiB"),
        (5 * 2**60, "5242880.0 TiB"),
    ],
)
def test_bytes_are_in_the_largest_unit_of_which_there_is_one(count: float, told: str) -> None:
    assert format_bytes(count) == told


@pytest.mark.parametrize(
    ("value", "told"), [(20480.0, "20,480"), (341.328, "341.33"), (0.5, "0.50"), (0.0, "0")]
)
def test_a_whole_number_has_no_decimals(value: float, told: str) -> None:
    assert short_decimal(value) == told
