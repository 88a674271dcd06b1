"""Replayed decode steps give the tokens of transformers in Triton's interpreter too."""

import pytest

from tests.unit.device.graphs import CHECKS


@pytest.mark.parametrize("name", CHECKS)
def test_replayed_steps_give_the_tokens_of_transformers(name: str) -> None:
    CHECKS[name]()
