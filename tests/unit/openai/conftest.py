"""One gateway for each module that requests it, and a worker and OpenAI's client for each test."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.unit.security.conftest import tokens as tokens

from .rig import FakeWorker, Gateway, running_gateway, until, worker_of_model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    async with running_gateway(max_requests=8, slow_reader_seconds=10.0) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def worker(gateway: Gateway) -> AsyncIterator[FakeWorker]:
    async with gateway.router.workers(worker_of_model("a")) as (only,):
        yield only
        await until(lambda: only.num_running == 0)


@pytest_asyncio.fixture(loop_scope="module")
async def client(gateway: Gateway) -> AsyncIterator[AsyncOpenAI]:
    async with gateway.client() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def batching(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    folder = tmp_path_factory.mktemp("batches")
    async with (
        running_gateway(batch_dir=str(folder), slow_reader_seconds=5.0) as running,
        running.router.workers(worker_of_model("a")),
    ):
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def batch_client(batching: Gateway) -> AsyncIterator[AsyncOpenAI]:
    async with batching.client() as made:
        yield made
