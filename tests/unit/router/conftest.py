"""One whole router for each module that requests it, and a worker for each test."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from blockyard.proto.text import load_tokenizer

from .fake_worker import FakeWorker
from .rig import MODEL, Router, running_router, until, worker_of_model


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return load_tokenizer(MODEL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router() -> AsyncIterator[Router]:
    async with running_router(max_requests=8, slow_reader_seconds=10.0) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def worker(router: Router) -> AsyncIterator[FakeWorker]:
    async with router.workers(worker_of_model("a")) as (only,):
        yield only
        await until(lambda: only.num_running == 0)
