"""The fixtures of tests/unit/kernels."""

from tests.unit.kernels.conftest import built as built
from tests.unit.kernels.conftest import cache as cache
from tests.unit.kernels.conftest import cpu_backend as cpu_backend
from tests.unit.kernels.conftest import use_compiler as use_compiler
