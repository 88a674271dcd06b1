"""Live page: answers its HTTP requests, for files and for data of clusters. Needs no Ray (head_module.py does).

Owns paths, status codes and headers. All requests are GET and change nothing. An error is returned as a sentence in
JSON. A defect is logged.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp.web
from blockyard.deploy.dashboard.announcement import Announcement, decode
from blockyard.deploy.dashboard.cluster_watch import ClusterWatch
from blockyard.deploy.dashboard.connection import CannotReach
from blockyard.deploy.dashboard.history import LOOK_SECONDS
from blockyard.deploy.dashboard.metrics_tab import frame_target
from blockyard.deploy.dashboard.prompt_queries import (
    block_dict,
    placement_dict,
    prefix_dict,
    prompt_arguments,
    requests_dict,
    sequence_dict,
)
from blockyard.deploy.dashboard.sign_in import HEADERS
from blockyard.proto.runtime.tasks import BackgroundTasks
from blockyard.router.client import BlockyardError, InvalidRequestError, NotFoundError

logger = logging.getLogger(__name__)

FILES = {
    "index.html": "text/html",
    "no-chart.html": "text/html",
    "style.css": "text/css",
    "dark.css": "text/css",
    "frame.js": "text/javascript",
    "app.js": "text/javascript",
    "map.js": "text/javascript",
    "models.js": "text/javascript",
    "details.js": "text/javascript",
    "ask.js": "text/javascript",
    "charts.js": "text/javascript",
    "requests.js": "text/javascript",
    "prefixes.js": "text/javascript",
    "pulls.js": "text/javascript",
    "dom.js": "text/javascript",
}
MAX_BLOCKS = 512
"""Limit on the blocks that one request may ask for."""
MAX_SHOWN_PREFIX = 1000
"""Limit on the blocks of a prefix that are looked up on each worker that holds it."""
MAX_HOLDERS = 8
"""Limit on the workers on which the blocks of a prefix are looked up."""
MAX_ASKED_AT_ONCE = 32
"""Limit on concurrent requests of all browsers for data. More get status 503."""
OTHER_VERSION = "a cluster on this Ray speaks another version of this page, which cannot show it"
_NUMBER = re.compile(r"\d{1,15}")
_NAME = re.compile(r"[0-9a-f]{32}")
Query = Mapping[str, str]


class LivePage:
    """The page of one dashboard, on one event loop. `announced` reads the supervisors' announcements and may raise."""

    def __init__(
        self, announced: Callable[[], Awaitable[list[bytes]]], *, look_seconds: float = LOOK_SECONDS
    ) -> None:
        self._announced = announced
        self._watches: dict[str, ClusterWatch] = {}
        self._trouble = ""
        self._num_asking = 0
        self._look_seconds = look_seconds
        self._tasks = BackgroundTasks()
        self._is_closed = False
        self._questions: dict[str, Callable[[ClusterWatch, Query, Query], Awaitable[dict[str, Any]]]] = {
            "api/blocks": self._blocks,
            "api/sequences": self._sequences,
            "api/sequence": self._sequence,
            "api/prefix": self._prefix,
            "api/placement": self._placement,
            "api/requests": self._requests,
            "api/prefixes": self._prefixes,
            "api/pulls": self._pulls,
        }

    async def close(self) -> None:
        self._is_closed = True
        await self._tasks.aclose()
        for watch in self._watches.values():
            await watch.close()

    async def answer(self, path: str, query: Query, headers: Query) -> aiohttp.web.Response:
        if path in FILES:
            file = Path(__file__).parent / "page" / path
            return aiohttp.web.Response(
                body=file.read_bytes(), content_type=FILES[path], charset="utf-8", headers=HEADERS
            )
        if target := frame_target(path, query):
            return aiohttp.web.Response(status=302, headers={**HEADERS, "Location": target})
        if path != "api/state" and path not in self._questions:
            return _json({"error": "there is nothing at this path"}, status=404)
        if self._num_asking >= MAX_ASKED_AT_ONCE:
            return _json({"error": "too many requests at once: try again later"}, status=503)
        self._num_asking += 1
        if not self._tasks and not self._is_closed:
            self._tasks.start(self._look(), name="charts of the live page")
        try:
            return await self._asked(path, query, headers)
        finally:
            self._num_asking -= 1

    async def _asked(self, path: str, query: Query, headers: Query) -> aiohttp.web.Response:
        if path == "api/state":
            return _json(await self._state(query))
        watch = self._watches.get(query.get("cluster", ""))
        if watch is None:
            return _json({"error": "cluster: no cluster of this name is known here"}, status=404)
        try:
            return _json(await self._questions[path](watch, query, headers))
        except (InvalidRequestError, ValueError) as error:
            return _json({"error": str(error)}, status=400)
        except NotFoundError as error:
            return _json({"error": str(error)}, status=404)
        except (BlockyardError, CannotReach) as error:
            return _json({"error": watch.error_text(error)}, status=502)

    async def _state(self, query: Query) -> dict[str, Any]:
        await self._hear()
        names = sorted(self._watches)
        wanted = query.get("cluster") or (names[0] if names else "")
        watch = self._watches.get(wanted)
        return {
            "clusters": names,
            "trouble": self._trouble,
            "picture": None if watch is None else await watch.latest(),
        }

    async def _look(self) -> None:
        """Collect a point for the charts at intervals, from the first request on, whether or not a page is open."""
        while True:
            try:
                await self._hear()
                await asyncio.gather(*(watch.look() for watch in list(self._watches.values())))
            except Exception:
                logger.exception("the charts of the live page miss a point")
            await asyncio.sleep(self._look_seconds)

    async def _hear(self) -> None:
        """Read the supervisors' announcements, and begin, update or end the watch of each cluster.

        While Ray's control service is away, the last announcements stay valid.
        """
        try:
            said = await self._announced()
        except Exception as error:
            # Exceptions of Ray and of its client differ between its versions.
            self._trouble = f"Ray's control service does not answer ({type(error).__name__})"
            return
        self._trouble = ""
        clusters: dict[str, Announcement] = {}
        for data in said:
            try:
                announcement = decode(data)
            except ValueError:
                self._trouble = OTHER_VERSION
            else:
                clusters[announcement.cluster] = announcement
        # Remove all before the first await, because another request may do the same meanwhile.
        for gone in [self._watches.pop(name) for name in self._watches.keys() - clusters.keys()]:
            await gone.close()
        for name, announcement in clusters.items():
            if name in self._watches:
                await self._watches[name].heard(announcement)
            else:
                self._watches[name] = ClusterWatch(announcement)

    async def _blocks(self, watch: ClusterWatch, query: Query, _: Query) -> dict[str, Any]:
        worker = _worker(query)
        if "name" in query:
            ids, names = [], [_name(query["name"])]
        else:
            first, count = _number(query, "first"), _number(query, "count", default=1)
            if not 1 <= count <= MAX_BLOCKS:
                raise ValueError(f"count: must be from 1 to {MAX_BLOCKS}")
            ids, names = list(range(min(first, 2**31), min(first, 2**31) + count)), []
        found = await watch.ask(lambda client: client.find_blocks(worker, block_ids=ids, names=names))
        return {"blocks": [block_dict(block) for block in found]}

    async def _requests(self, watch: ClusterWatch, _query: Query, _headers: Query) -> dict[str, Any]:
        return requests_dict(await watch.requests())

    async def _pulls(self, watch: ClusterWatch, _query: Query, _headers: Query) -> dict[str, Any]:
        return await watch.pulls()

    async def _prefixes(self, watch: ClusterWatch, _query: Query, _headers: Query) -> dict[str, Any]:
        return await watch.prefixes()

    async def _sequences(self, watch: ClusterWatch, query: Query, _: Query) -> dict[str, Any]:
        worker = _worker(query)
        found = await watch.ask(lambda client: client.list_sequences(worker))
        return {"sequences": [sequence_dict(sequence) for sequence in found]}

    async def _sequence(self, watch: ClusterWatch, query: Query, _: Query) -> dict[str, Any]:
        worker, sequence_id = _worker(query), _number(query, "id")
        found = await watch.ask(lambda client: client.sequence(worker, sequence_id))
        return {"sequence": None if found is None else sequence_dict(found)}

    async def _prefix(self, watch: ClusterWatch, _: Query, headers: Query) -> dict[str, Any]:
        arguments = prompt_arguments(headers)
        found = await watch.ask(lambda client: client.lookup_prefix(**arguments))
        answer = prefix_dict(found)
        for holder in answer["holders"][:MAX_HOLDERS]:
            names = found.block_names[: min(holder["blocks"], MAX_SHOWN_PREFIX)]
            holder["block_ids"] = await self._ids_of(watch, holder["worker"], names)
        return answer

    async def _ids_of(self, watch: ClusterWatch, worker: str, names: Any) -> list[int]:
        """Return the ids of those blocks that the worker holds now. Empty if it does not answer."""
        try:
            found = await watch.ask(lambda client: client.find_blocks(worker, names=list(names)))
        except (BlockyardError, CannotReach):
            return []
        return [block.block_id for block in found]

    async def _placement(self, watch: ClusterWatch, _: Query, headers: Query) -> dict[str, Any]:
        arguments = prompt_arguments(headers)
        return placement_dict(await watch.ask(lambda client: client.explain_placement(**arguments)))


def _json(document: dict[str, Any], status: int = 200) -> aiohttp.web.Response:
    return aiohttp.web.json_response(document, status=status, headers=HEADERS)


def _worker(query: Query) -> str:
    if not query.get("worker"):
        raise ValueError("worker: is required")
    return query["worker"]


def _number(query: Query, name: str, default: int | None = None) -> int:
    text = query.get(name, "" if default is None else str(default))
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{name}: must be a number")
    return int(text)


def _name(text: str) -> bytes:
    if not _NAME.fullmatch(text):
        raise ValueError("name: must be 32 hexadecimal digits")
    return bytes.fromhex(text)
