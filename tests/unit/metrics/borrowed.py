"""Helpers that these tests share with those of routers and clusters."""

from tests.system.harness import UP as UP
from tests.system.harness import Cluster as Cluster
from tests.system.harness import Command as Command
from tests.system.harness import eventually as eventually
from tests.system.harness import remembered_state as remembered_state
from tests.unit.router.fake_worker import Script as Script
from tests.unit.router.rig import FOREVER as FOREVER
from tests.unit.router.rig import Router as Router
from tests.unit.router.rig import is_idle as is_idle
from tests.unit.router.rig import reason_of as reason_of
from tests.unit.router.rig import refused as refused
from tests.unit.router.rig import request as request
from tests.unit.router.rig import running_router as running_router
from tests.unit.router.rig import until as until
from tests.unit.router.rig import worker_of_model as worker_of_model
