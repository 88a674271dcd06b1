"""Real processes behind the HTTP port, and two routers with one real Redis."""

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from blockyard.deploy.machine.redis_server import RedisProcess, redis_user, start_private_redis
from openai import AsyncOpenAI

from tests.system.processes import DETERMINISTIC, Process, processes
from tests.unit.openai.rig import (
    FakeWorker,
    Gateway,
    Tokens,
    running_gateway,
    says,
    served_by,
    worker_of_model,
)


def gateway_of(router: Process) -> str:
    """Return the URL of a router's HTTP port."""
    found = re.search(r"(http://\S+)/v1", router.log_text())
    assert found
    return found[1]


@contextmanager
def served(
    folder: Path,
    *,
    worker: tuple[str, ...] = DETERMINISTIC,
    router: tuple[str, ...] = (),
    with_redis: bool = False,
    **options: Any,
) -> Iterator[str]:
    """The URL of a real router with one real worker."""
    with processes(folder, with_redis=with_redis) as running:
        serving = running.add_worker("w0", *worker, **options)
        front = running.add_router("r0", "--http-port", "0", *router, workers=[serving.address], **options)
        running.start(serving, front)
        yield gateway_of(front)


@dataclass(frozen=True)
class House:
    """Two routers with one worker each, and their Redis."""

    redis: RedisProcess
    gateways: list[Gateway]
    workers: list[FakeWorker]
    clients: list[AsyncOpenAI]
    """One for each router, of the tenant acme."""
    stranger: AsyncOpenAI
    """The client of a user of the tenant bravo, at the second router."""

    def says(self, text: str) -> None:
        for worker in self.workers:
            says(worker, text)

    def keys(self) -> list[bytes]:
        with redis.Redis.from_url(self.redis.url) as admin:
            return list(admin.scan_iter("*:records:*"))


@asynccontextmanager
async def running_house(folder: Path, tokens: Tokens, **settings: Any) -> AsyncIterator[House]:
    user = redis_user("router", "default")
    process = start_private_redis(folder, password="of-the-admin", users=(user,))
    settings |= {"redis_url": process.url_of(user), "auth_file": str(tokens.path)}
    try:
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            gateways = [await enter(running_gateway(**settings)) for _ in range(2)]
            workers = [
                await enter(served_by(gateway, worker_of_model(name)))
                for gateway, name in zip(gateways, "ab", strict=True)
            ]
            clients = [
                await enter(gateway.client(api_key=tokens.of[name]))
                for gateway, name in zip([*gateways, gateways[1]], ("ann", "amy", "bob"), strict=True)
            ]
            yield House(process, gateways, workers, clients[:2], clients[2])
    finally:
        process.stop()
