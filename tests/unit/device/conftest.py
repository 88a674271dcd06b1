"""The settings of tests/unit/worker."""

import tests.unit.worker.conftest  # noqa: F401
