"""The fixtures of tests/unit/kernels."""

from tests.unit.kernels.conftest import assert_near as assert_near
from tests.unit.kernels.conftest import backend as backend
from tests.unit.kernels.conftest import cpu_backend as cpu_backend
from tests.unit.kernels.conftest import device as device
from tests.unit.kernels.conftest import make_step as make_step
from tests.unit.kernels.conftest import triton_backend as triton_backend
