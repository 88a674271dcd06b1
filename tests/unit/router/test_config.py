"""Settings of a router and of its placement: a wrong one is named with its value."""

from dataclasses import fields
from typing import Any

import pytest
from blockyard.router.config import RouterConfig, RouterLimits
from blockyard.router.placement.config import PlacementConfig, parse_placement

SETTINGS = [setting.name for setting in fields(PlacementConfig)]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_every_setting_is_a_number_from_0_on(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .* not {value}"):
        PlacementConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("assumed_prefill_tokens_per_second", 0.0),
        ("memory_free_fraction", 0.0),
        ("memory_free_fraction", 1.5),
        ("rendezvous_tokens", 0),
        ("remembered_sessions", 0),
        ("max_unstarted", 0),
    ],
)
def test_what_would_divide_by_nothing_or_place_nothing_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        PlacementConfig(**{name: value})


def test_settings_are_read_by_name_in_their_own_kind() -> None:
    config = parse_placement(["near_equal_ms=2", "max_unstarted=8"])
    assert config == PlacementConfig(near_equal_ms=2.0, max_unstarted=8)
    assert parse_placement([]) == PlacementConfig()


@pytest.mark.parametrize(
    ("pairs", "told"),
    [
        (["near_equal=2"], "'near_equal=2' sets none of .*near_equal_ms"),
        (["near_equal_ms"], "'near_equal_ms' is not NAME=VALUE"),
        (["near_equal_ms="], "near_equal_ms must be a number, not ''"),
        (["near_equal_ms=fast"], "near_equal_ms must be a number, not 'fast'"),
        (["max_unstarted=1.5"], "max_unstarted must be a whole number, not '1.5'"),
        (["near_equal_ms=nan"], "near_equal_ms must be finite and not negative, not nan"),
        (["near_equal_ms=1", "near_equal_ms=2"], "near_equal_ms is given twice"),
    ],
)
def test_a_setting_that_cannot_be_read_is_named(pairs: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_placement(pairs)


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"max_requests": 0}, "max_requests must be at least 1, not 0"),
        ({"max_tokens_admitted": -1}, "max_tokens_admitted must be at least 1, not -1"),
        ({"max_queue_seconds": 0.0}, "max_queue_seconds must be above 0, not 0"),
        ({"max_queue_seconds": float("nan")}, "max_queue_seconds must be above 0, not nan"),
        ({"tenant_weights": {"a b": 2.0}}, "a tenant's name must be .*, not 'a b'"),
    ],
)
def test_a_limit_that_cannot_be_is_named_alike_by_a_router_and_by_up(limits: dict[str, Any], told: str):
    with pytest.raises(ValueError, match=told):
        RouterConfig(model="demo", **limits)
    with pytest.raises(ValueError, match=told):
        RouterLimits(**limits)
