"""Module of Ray's dashboard: a child process, to which the dashboard forwards all requests below /blockyard.

The only file that subclasses Ray's internals (2.52 to 2.60, see start_hook.py). The dashboard, its child and its fork
server load it, so it imports very little. The child loads live_page.py with the first request. A failure here must not
break the module's start, because Ray's dashboard does not start without the module. So it refuses a changed base class
of Ray before it defines its own class.
"""

import logging
import os
from typing import TYPE_CHECKING

import aiohttp.web
from blockyard.deploy.dashboard.metrics_tab import ANSWERS, STAND_IN_PATH, is_asked_for
from ray.dashboard.subprocesses.module import SubprocessModule
from ray.dashboard.subprocesses.routes import SubprocessRouteTable

if TYPE_CHECKING:
    from blockyard.deploy.dashboard.live_page import LivePage

logger = logging.getLogger(__name__)

KV_SECONDS = 1.0
USED = ("gcs_client", "run")
"""Attributes of the base class that this module uses."""
SORRY = "The live page is broken on this head; the dashboard's log dashboard_BlockyardHead.log says why.\n"


def check_base(base: type) -> None:
    """Raise ImportError for a base class with which the dashboard would not start or the page would stay empty."""
    abstract: frozenset[str] = getattr(base, "__abstractmethods__", frozenset())
    missing = [name for name in USED if not hasattr(base, name)]
    if abstract or missing:
        raise ImportError(f"Ray's {base.__name__} lacks {missing} and wants {sorted(abstract)}")


check_base(SubprocessModule)


class BlockyardHead(SubprocessModule):
    """Routes of the live page. GET only, because Ray's dashboard refuses other methods from browsers."""

    _page: "LivePage | None" = None

    @SubprocessRouteTable.get("/blockyard")  # type: ignore[no-untyped-call, untyped-decorator]
    async def page(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        return await self._answer(request, "index.html")

    @SubprocessRouteTable.get("/blockyard/{tail:.+}")  # type: ignore[no-untyped-call, untyped-decorator]
    async def below(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        return await self._answer(request, request.match_info["tail"])

    @SubprocessRouteTable.get(STAND_IN_PATH + "/{tail:.+}")  # type: ignore[no-untyped-call, untyped-decorator]
    async def stand_in(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        answer = ANSWERS.get(request.match_info["tail"]) if is_asked_for(os.environ) else None
        return aiohttp.web.json_response(answer) if answer else aiohttp.web.Response(status=404)

    async def _answer(self, request: aiohttp.web.Request, path: str) -> aiohttp.web.Response:
        try:
            if self._page is None:
                from blockyard.deploy.dashboard.live_page import LivePage

                self._page = LivePage(self._announced)
            return await self._page.answer(path, request.query, request.headers)
        except Exception:
            logger.exception("a request of the live page failed")
            return aiohttp.web.Response(status=500, text=SORRY)

    async def _announced(self) -> list[bytes]:
        """Return all clusters' announcements, as they are encoded. Raise if Ray's control service does not answer."""
        from blockyard.deploy.dashboard.announcement import KV_NAMESPACE

        kv = self.gcs_client
        keys = await kv.async_internal_kv_keys(b"", namespace=KV_NAMESPACE, timeout=KV_SECONDS)
        found = [
            await kv.async_internal_kv_get(key, namespace=KV_NAMESPACE, timeout=KV_SECONDS) for key in keys
        ]
        return [value for value in found if value]
