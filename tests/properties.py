"""How many random examples a property tries."""

from typing import Any

from hypothesis import settings


def examples(count: int, **others: Any) -> settings:
    """Return settings with `count` examples in CI, and with the quick profile's share of them in `make test`."""
    usual, wanted = settings.get_profile("crowded").max_examples, settings().max_examples
    return settings(max_examples=-(-count * wanted // usual), **others)
