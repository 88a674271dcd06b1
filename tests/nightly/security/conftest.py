"""The fixtures of tests/unit/security."""

from tests.unit.security.conftest import tokens as tokens
