"""The cluster of tests/system, for the tests that change it."""

from tests.system.conftest import cluster as cluster
