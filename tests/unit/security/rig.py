"""Rigs of other folders that the tests of this one use too."""

from tests.system.harness import UP as UP
from tests.system.harness import Command as Command
from tests.system.harness import remembered_state as remembered_state
from tests.system.load import until_ready as until_ready
from tests.system.processes import DETERMINISTIC as DETERMINISTIC
from tests.system.processes import SECRET as CLUSTER_SECRET  # noqa: F401
from tests.system.processes import SIMULATED as SIMULATED
from tests.system.processes import Process as Process
from tests.system.processes import Processes as Processes
from tests.system.processes import processes as processes
from tests.unit.router.fake_worker import FakeWorker as FakeWorker
from tests.unit.router.rig import FOREVER as FOREVER
from tests.unit.router.rig import MODEL as MODEL
from tests.unit.router.rig import Router as Router
from tests.unit.router.rig import config as config
from tests.unit.router.rig import fields_of as fields_of
from tests.unit.router.rig import is_ready as is_ready
from tests.unit.router.rig import reason_of as reason_of
from tests.unit.router.rig import refused as refused
from tests.unit.router.rig import request as request
from tests.unit.router.rig import running_router as running_router
from tests.unit.router.rig import until as until
from tests.unit.router.rig import worker_of_model as worker_of_model
