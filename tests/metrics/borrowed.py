"""Helpers that these tests share with those of routers and clusters."""

from ..cluster.harness import UP as UP  # noqa: TID252
from ..cluster.harness import Cluster as Cluster  # noqa: TID252
from ..cluster.harness import Command as Command  # noqa: TID252
from ..cluster.harness import eventually as eventually  # noqa: TID252
from ..cluster.harness import remembered_state as remembered_state  # noqa: TID252
from ..router.fake_worker import Script as Script  # noqa: TID252
from ..router.rig import FOREVER as FOREVER  # noqa: TID252
from ..router.rig import Router as Router  # noqa: TID252
from ..router.rig import is_idle as is_idle  # noqa: TID252
from ..router.rig import reason_of as reason_of  # noqa: TID252
from ..router.rig import refused as refused  # noqa: TID252
from ..router.rig import request as request  # noqa: TID252
from ..router.rig import running_router as running_router  # noqa: TID252
from ..router.rig import until as until  # noqa: TID252
from ..router.rig import worker_of_model as worker_of_model  # noqa: TID252
