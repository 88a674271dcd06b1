"""Helpers of other test folders that this folder shares."""

from tests.system.harness import eventually as eventually
from tests.system.processes import SIMULATED as SIMULATED
from tests.system.processes import processes as processes
from tests.unit.router.rig import running_router as running_router
from tests.unit.router.rig import worker_of_model as worker_of_model
