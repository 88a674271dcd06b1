"""How many random examples a property tries."""

from typing import Any

from hypothesis import settings


def examples(count: int, **others: Any) -> settings:
    """Return settings with `count` examples each night, and with the share of them that the profile in use has."""
    usual, wanted = settings.get_profile("nightly").max_examples, settings().max_examples
    return settings(max_examples=-(-count * wanted // usual), **others)
