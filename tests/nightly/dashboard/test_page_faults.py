"""The live page while routers, workers and Ray's control service freeze, die and return: it goes on and shows it."""

import asyncio
import signal

import pytest

from .browser import Browser
from .onlooker import keep_picture, shown
from .stage import Processes, Stage

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECONDS = 50.0
"""Ten times what the page promises."""


async def test_a_frozen_router_costs_one_deadline_and_not_the_page(page: Browser, cluster: Processes) -> None:
    for name in ("router-0", "router-1"):
        cluster.routers[name].signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(4.0)
            await page.until("document.querySelector('#pulse').textContent === 'live'", seconds=SECONDS)
            assert await page.evaluate("document.querySelector('#trouble').hidden")
        finally:
            cluster.routers[name].signal(signal.SIGCONT)


async def test_a_frozen_worker_shows_as_dead_and_the_other_one_as_before(
    page: Browser, cluster: Processes
) -> None:
    cluster.workers["worker-1"].signal(signal.SIGSTOP)
    try:
        await page.until("document.querySelector('[data-worker=worker-1] .state').textContent === 'dead'")
        assert await page.text("[data-worker=worker-0] .state") == "ready"
        await page.until("document.querySelector('#pulse').textContent === 'live'")
    finally:
        cluster.workers["worker-1"].signal(signal.SIGCONT)
    await page.until("document.querySelector('[data-worker=worker-1] .state').textContent === 'ready'")


async def test_a_dead_worker_shows_as_dead_within_seconds_and_its_next_life_as_a_new_one(
    page: Browser, cluster: Processes, stage: Stage
) -> None:
    worker = cluster.workers["worker-1"]
    before = (await shown(page, "worker-1"))["incarnation"]
    worker.kill()
    began = asyncio.get_running_loop().time()
    await page.until(
        "document.querySelector('[data-worker=worker-1] .state').textContent === 'dead'", seconds=SECONDS
    )
    print(f"shown as dead after {asyncio.get_running_loop().time() - began:.1f} s")
    assert "the numbers below are its last ones" in (await shown(page, "worker-1"))["reason"]
    figure = "getComputedStyle(document.querySelector('[data-worker=worker-1] [data-field=running]'))"
    assert float(await page.evaluate(f"{figure}.opacity")) < 0.5
    await keep_picture(page, "dead")
    total = (await shown(page, "worker-1"))["total"]
    await page.open(stage.url)
    await page.until(
        f"document.querySelector('[data-worker=worker-1] [data-field=total]')?.textContent === '{total}'"
    )
    assert (await shown(page, "worker-1"))["reason"].startswith("dead since ")
    cluster.start(worker)
    await page.until("document.querySelector('[data-worker=worker-1] .state').textContent === 'ready'")
    assert (await shown(page, "worker-1"))["incarnation"] != before


async def test_without_any_router_the_page_says_so_and_shows_who_should_run(
    page: Browser, cluster: Processes
) -> None:
    for router in cluster.routers.values():
        router.signal(signal.SIGSTOP)
    try:
        await page.until("!document.querySelector('#trouble').hidden")
        assert await page.evaluate("document.querySelectorAll('.card').length") == 2
    finally:
        for router in cluster.routers.values():
            router.signal(signal.SIGCONT)
    await page.until("document.querySelector('#trouble').hidden")


async def test_while_rays_control_service_is_away_the_page_goes_on_with_what_it_knows(
    page: Browser, stage: Stage
) -> None:
    said, stage.announcements = stage.announcements, None
    try:
        assert "control service does not answer" in await page.text("#trouble")
        assert await page.text("[data-worker=worker-0] .state") == "ready"
    finally:
        stage.announcements = said
    await page.until("document.querySelector('#trouble').hidden")
