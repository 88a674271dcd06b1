"""Steps that the tests of the page share: running requests, clicks on a map, fields of a card."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from blockyard.proto.v1.cluster_pb2 import ExplainPlacementResponse
from blockyard.router.client import AsyncClient

from .browser import Browser
from .stage import Processes

PICTURES_VARIABLE = "BLOCKYARD_PAGE_PICTURES"
"""A folder: the tests put there what they see, for the documents."""
SYSTEM_PROMPT = "You write short Python functions for people who read them twice. " * 12


def client_of(cluster: Processes) -> AsyncClient:
    return AsyncClient(cluster.routers["router-0"].address, timeout_seconds=20.0)


@asynccontextmanager
async def running(cluster: Processes, count: int, **arguments: Any) -> AsyncIterator[AsyncClient]:
    """Run `count` requests that share a system prompt while the context lasts."""
    async with client_of(cluster) as client:
        streams = [
            client.stream(f"{SYSTEM_PROMPT} Question {number}.", max_tokens=600, ignore_eos=True, **arguments)
            for number in range(count)
        ]
        for stream in streams:
            await anext(stream)
        try:
            yield client
        finally:
            for stream in streams:
                await stream.aclose()


async def busiest(client: AsyncClient) -> str:
    """The worker with the most running sequences."""
    workers = await client.list_workers()
    return max(workers, key=lambda worker: worker.load.running).worker_id


async def keep_picture(page: Browser, name: str) -> None:
    if folder := os.environ.get(PICTURES_VARIABLE):
        await asyncio.sleep(1.2)
        await page.picture(Path(folder) / f"live-page-{name}.png")


async def shown(page: Browser, worker: str) -> dict[str, str]:
    """The fields of a worker's card, by name."""
    selector = json.dumps(f'[data-worker="{worker}"] [data-field]')
    entries = f"[...document.querySelectorAll({selector})].map((e) => [e.dataset.field, e.textContent])"
    fields: dict[str, str] = await page.evaluate(f"Object.fromEntries({entries})")
    return fields


async def click_cell(page: Browser, worker: str, cell: int) -> None:
    """With the mouse, on the canvas."""
    canvas = f'[data-worker="{worker}"] canvas'
    x, y, pitch, columns = await page.until(
        f"""(() => {{
          const canvas = document.querySelector({json.dumps(canvas)});
          canvas.scrollIntoView({{block: "center"}});
          const box = canvas.getBoundingClientRect();
          return [box.x, box.y, Number(canvas.dataset.pitch), Number(canvas.dataset.columns)];
        }})()"""
    )
    middle = pitch / 2
    await page.click_at(x + (cell % columns) * pitch + middle, y + (cell // columns) * pitch + middle)


async def fill(client: AsyncClient) -> None:
    """Prompts of several kinds, so that pools hold what pools hold."""
    topics = ("parsers", "queues", "graphs", "clocks", "sockets", "matrices")
    prompts = [f"A chapter about {topic} and how they fail. " * 30 for topic in topics]
    await asyncio.gather(*(client.generate(prompt, max_tokens=8, ignore_eos=True) for prompt in prompts))


@asynccontextmanager
async def screen_of(page: Browser, width: int) -> AsyncIterator[None]:
    """Give the page a screen of this width while the context lasts."""
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    await page.call("Emulation.setDeviceMetricsOverride", **screen)
    try:
        yield
    finally:
        await page.call("Emulation.clearDeviceMetricsOverride")


async def told_of_placement(page: Browser, monkeypatch: pytest.MonkeyPatch, **explained: Any) -> str:
    """Ask for a placement whose explanation is fixed. All else from the page's server to the screen is real."""

    async def explain(*_: object, **__: object) -> ExplainPlacementResponse:
        return ExplainPlacementResponse(index_available=True, **explained)

    monkeypatch.setattr(AsyncClient, "explain_placement", explain)
    await page.type_into("#prompt", "anything")
    await page.click("#ask button[value=placement]")
    return await page.text("#answer [data-field=chosen]")


async def rows_of(page: Browser, selector: str) -> Any:
    """Return the texts of the cells of each row."""
    rows = f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.innerText.split('\\t'))"
    return await page.evaluate(rows)
