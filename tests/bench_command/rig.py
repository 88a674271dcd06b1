"""Helpers of other test folders that this folder shares."""

from ..cluster.harness import eventually as eventually  # noqa: TID252
from ..faults.processes import SIMULATED as SIMULATED  # noqa: TID252
from ..faults.processes import processes as processes  # noqa: TID252
from ..router.rig import running_router as running_router  # noqa: TID252
from ..router.rig import worker_of_model as worker_of_model  # noqa: TID252
