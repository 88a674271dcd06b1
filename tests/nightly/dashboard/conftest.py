"""The fixtures of tests/unit/dashboard."""

from tests.unit.dashboard.conftest import browser as browser
from tests.unit.dashboard.conftest import cluster as cluster
from tests.unit.dashboard.conftest import page as page
from tests.unit.dashboard.conftest import stage as stage
