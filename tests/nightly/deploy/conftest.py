"""The home of each test of tests/unit/deploy."""

from tests.unit.deploy.conftest import home as home
