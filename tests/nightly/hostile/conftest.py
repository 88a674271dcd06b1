"""The fixtures of tests/unit/hostile."""

from tests.unit.hostile.conftest import house as house
