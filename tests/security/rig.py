"""Rigs of other folders that the tests of this one use too."""

from ..cluster.harness import UP as UP  # noqa: TID252
from ..cluster.harness import Command as Command  # noqa: TID252
from ..cluster.harness import remembered_state as remembered_state  # noqa: TID252
from ..faults.load import until_ready as until_ready  # noqa: TID252
from ..faults.processes import DETERMINISTIC as DETERMINISTIC  # noqa: TID252
from ..faults.processes import SECRET as CLUSTER_SECRET  # noqa: F401, TID252
from ..faults.processes import SIMULATED as SIMULATED  # noqa: TID252
from ..faults.processes import Process as Process  # noqa: TID252
from ..faults.processes import Processes as Processes  # noqa: TID252
from ..faults.processes import processes as processes  # noqa: TID252
from ..router.fake_worker import FakeWorker as FakeWorker  # noqa: TID252
from ..router.rig import FOREVER as FOREVER  # noqa: TID252
from ..router.rig import MODEL as MODEL  # noqa: TID252
from ..router.rig import Router as Router  # noqa: TID252
from ..router.rig import config as config  # noqa: TID252
from ..router.rig import fields_of as fields_of  # noqa: TID252
from ..router.rig import is_ready as is_ready  # noqa: TID252
from ..router.rig import reason_of as reason_of  # noqa: TID252
from ..router.rig import refused as refused  # noqa: TID252
from ..router.rig import request as request  # noqa: TID252
from ..router.rig import running_router as running_router  # noqa: TID252
from ..router.rig import until as until  # noqa: TID252
from ..router.rig import worker_of_model as worker_of_model  # noqa: TID252
