"""A router's settings: the router and the programs that start it name a wrong setting with its value."""

from typing import Any

import pytest
from blockyard.router.config import RouterConfig, RouterLimits


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
