"""The fixtures of tests/unit/router."""

from tests.unit.router.conftest import router as router
from tests.unit.router.conftest import tokenizer as tokenizer
from tests.unit.router.conftest import worker as worker
