"""One cluster of real processes and one browser for each module that reads the page."""

import json
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from .browser import Browser, open_browser
from .stage import SIMULATED, Processes, Stage, announcement_of, processes, staged


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("page"), with_redis=True) as cluster:
        options = (*SIMULATED, "--host-cache-gib", "0.005", "--simulated-step-seconds", "0.2")
        workers = [cluster.add_worker(name, *options) for name in ("worker-0", "worker-1")]
        addresses = [worker.address for worker in workers]
        routers = [cluster.add_router(name, workers=addresses) for name in ("router-0", "router-1")]
        cluster.start(*workers, *routers)
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with open_browser() as browser:
        yield browser


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(cluster: Processes) -> AsyncIterator[Stage]:
    async with staged(announcement_of(cluster)) as stage:
        yield stage


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, stage: Stage) -> Browser:
    await browser.open(stage.url)
    await browser.until(f"document.querySelectorAll({json.dumps('.card .state.ready')}).length === 2")
    return browser
