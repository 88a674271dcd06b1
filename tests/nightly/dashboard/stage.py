"""The live page with real routers and workers, without Ray: its requests are served here as the dashboard does.

Does not own the parts that need Ray, the module's start and the supervisor's reports: test_on_ray.py tests those.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import aiohttp.web
from blockyard.deploy.dashboard.announcement import AnnouncedReplica, Announcement, encode
from blockyard.deploy.dashboard.live_page import LivePage

from tests.system.processes import SIMULATED as SIMULATED
from tests.system.processes import Process as Process
from tests.system.processes import Processes as Processes
from tests.system.processes import processes as processes

LOOK_SECONDS = 0.5
"""Between two points of the charts, so that no test waits for ten seconds."""
ANNOUNCEMENT = Announcement(
    cluster="default", model="demo", uses_tls=False, wants_certificate=False, wants_token=False, replicas=()
)


def replica_of(process: Process, kind: str) -> AnnouncedReplica:
    return AnnouncedReplica(
        name=process.name, kind=kind, phase="serving", address=process.address, incarnation="", num_starts=1
    )


def announcement_of(cluster: Processes) -> Announcement:
    workers = [replica_of(process, "worker") for process in cluster.workers.values()]
    routers = [replica_of(process, "router") for process in cluster.routers.values()]
    return replace(ANNOUNCEMENT, replicas=(*workers, *routers))


@dataclass(slots=True)
class Stage:
    """A page that is served at `url`. `announcements` are the supervisors'; None: the control service is down."""

    announcements: list[Announcement] | None = field(default_factory=list)
    url: str = ""

    async def announced(self) -> list[bytes]:
        if self.announcements is None:
            raise ConnectionError("no control service")
        return [encode(announcement) for announcement in self.announcements]


@asynccontextmanager
async def staged(*announcements: Announcement) -> AsyncIterator[Stage]:
    stage = Stage(list(announcements))
    page = LivePage(stage.announced, look_seconds=LOOK_SECONDS)

    async def serve(request: aiohttp.web.Request) -> aiohttp.web.Response:
        path = request.match_info.get("tail", "index.html")
        return await page.answer(path, request.query, request.headers)

    app = aiohttp.web.Application()
    app.add_routes([aiohttp.web.get("/blockyard", serve), aiohttp.web.get("/blockyard/{tail:.+}", serve)])
    runner = aiohttp.web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
        stage.url = f"http://127.0.0.1:{runner.addresses[0][1]}/blockyard"
        yield stage
    finally:
        await page.close()
        await runner.cleanup()
