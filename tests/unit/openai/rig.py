"""A router with its gateway and scripted workers, OpenAI's own client, and plain HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from blockyard.proto.text import IncrementalDetokenizer, load_tokenizer
from openai import AsyncOpenAI

from tests.unit.router.fake_worker import SECRET as SECRET
from tests.unit.router.fake_worker import FakeWorker as FakeWorker
from tests.unit.router.fake_worker import Script as Script
from tests.unit.router.fake_worker import expected_logprob as expected_logprob
from tests.unit.router.fake_worker import expected_tokens as expected_tokens
from tests.unit.router.rig import MODEL as MODEL
from tests.unit.router.rig import Router, running_router
from tests.unit.router.rig import config as config
from tests.unit.router.rig import is_idle as is_idle
from tests.unit.router.rig import until as until
from tests.unit.router.rig import waiting_for_redis as waiting_for_redis
from tests.unit.router.rig import worker_of_model as worker_of_model
from tests.unit.security.certificates import Authority as Authority
from tests.unit.security.conftest import Tokens as Tokens

HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer to a plain HTTP request."""

    status: int
    headers: dict[str, str]
    """Headers, by lower-case name."""
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    router: Router

    @property
    def address(self) -> str:
        return self.router.server.http_address

    def client(self, **options: Any) -> AsyncOpenAI:
        settings = {
            "base_url": f"http://{self.address}/v1",
            "api_key": "none",
            "max_retries": 0,
            "timeout": 20.0,
        }
        return AsyncOpenAI(**{**settings, **options})

    async def post(self, body: Any, path: str = CHAT, **headers: str) -> Answer:
        """`body`: bytes as they are, anything else as JSON. Underscores in names of headers are hyphens."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"content-type": "application/json", "content-length": str(len(raw))}
        named |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in named.items() if value)
        return await self.raw(f"POST {path} HTTP/1.1\r\nhost: x\r\n{head}\r\n".encode() + raw)

    async def get(self, path: str, verb: str = "GET") -> Answer:
        return await self.raw(f"{verb} {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())

    async def raw(self, message: bytes) -> Answer:
        """One answer, whatever was sent."""
        reader, writer = await self.connect()
        try:
            async with asyncio.timeout(30):
                writer.write(message)
                return await read_answer(reader)
        finally:
            writer.close()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.address.rpartition(":")
        return await asyncio.open_connection(host.strip("[]"), int(port))


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.split(": ", 1) for line in head[1:] if line)
    headers = {name.lower(): value for name, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Answer(status=int(head[0].split()[1]), headers=headers, body=body)


@asynccontextmanager
async def running_gateway(**settings: Any) -> AsyncIterator[Gateway]:
    async with running_router(http_port=0, **settings) as router:
        yield Gateway(router=router)


@asynccontextmanager
async def served_by(gateway: Gateway, worker: FakeWorker) -> AsyncIterator[FakeWorker]:
    """The router is asked itself: over gRPC it would want a token."""
    server = gateway.router.server
    async with worker:
        server.set_workers([worker.address])
        await until(lambda: server.num_ready_workers == 1)
        yield worker
        server.set_workers([])
    await until(lambda: server.num_ready_workers == 0)


def text_of(token_ids: list[int]) -> str:
    detokenizer = IncrementalDetokenizer(load_tokenizer(MODEL))
    return detokenizer.push(token_ids) + detokenizer.finish()


def expected_text(seed: int, count: int, index: int = 0) -> str:
    """Return the text that every worker generates."""
    return text_of(expected_tokens(seed, count, index))
