"""Clients of the router benchmark, and delays computed from their receipts and the workers' stamps.

All processes read the machine's monotonic clock, so a delay is the difference of two stamps. It excludes the worker's
own time. `delays` is pure. Below it is a client for each way to a worker: our router, an engine session, and HTTP. HTTP
goes through sglang-router or directly to its worker.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
from blockyard.proto.naming.block_hash import pack_tokens
from blockyard.proto.security.tls import session_channels
from blockyard.proto.v1 import inference_pb2, session_pb2
from blockyard.proto.v1.inference_pb2_grpc import InferenceServiceStub
from blockyard.proto.v1.session_pb2_grpc import EngineServiceStub

NUM_CHANNELS = 16
"""Connections of our client, distributed among a router's processes."""
REQUEST_SECONDS = 60.0


@dataclass(slots=True)
class Receipt:
    """One request as its client saw it, on the machine's monotonic clock in nanoseconds."""

    number: int
    """Number under which the worker keeps its stamps."""
    sent: int = 0
    messages: list[tuple[int, int]] = field(default_factory=list)
    """Time of arrival and number of tokens of each message."""
    num_tokens: int = 0

    def add(self, num_tokens: int) -> None:
        if num_tokens:
            self.messages.append((time.monotonic_ns(), num_tokens))
            self.num_tokens += num_tokens


Ask = Callable[[Receipt], Awaitable[None]]
"""Sends a request, and fills in its receipt until the answer's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Delays on the way to the worker and back in milliseconds, without the worker's own time."""

    first: list[float]
    """Delay of each request from client to worker, plus that of its first token from worker to client."""
    later: list[float]
    """Delay of each later token from worker to client."""


def delays(receipts: Iterable[Receipt], stamps: Mapping[int, Mapping[str, Any]]) -> Delays:
    """Compute the delays of all received tokens. Raise ValueError for more tokens than were emitted."""
    first, later = [], []
    for receipt in receipts:
        stamp = stamps[receipt.number]
        came = [at for at, count in receipt.messages for _ in range(count)]
        if len(came) > len(stamp["emitted"]):
            raise ValueError(
                f"request {receipt.number} got {len(came)} tokens, but {len(stamp['emitted'])} were emitted"
            )
        ways = [(there - here) / 1e6 for here, there in zip(stamp["emitted"], came, strict=False)]
        first.append((stamp["arrived"] - receipt.sent) / 1e6 + ways[0])
        later += ways[1:]
    return Delays(first=first, later=later)


@asynccontextmanager
async def router_client(
    address: str, prompt: Callable[[int], str], num_tokens: int, *, num_channels: int = NUM_CHANNELS
) -> AsyncIterator[Ask]:
    async with AsyncExitStack() as stack:
        # Give each channel its own pool: equal channels would share one connection, and so one router process.
        own_pool = (("grpc.use_local_subchannel_pool", 1),)
        stubs = [
            InferenceServiceStub(  # type: ignore[no-untyped-call]
                await stack.enter_async_context(grpc.aio.insecure_channel(address, options=own_pool))
            )
            for _ in range(num_channels)
        ]

        async def ask(receipt: Receipt) -> None:
            number = receipt.number
            sampling = inference_pb2.SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=number)
            request = inference_pb2.GenerateRequest(prompt=prompt(number), sampling=sampling)
            receipt.sent = time.monotonic_ns()
            async for message in stubs[number % num_channels].GenerateStream(
                request, timeout=REQUEST_SECONDS
            ):
                if message.delta.token_offset != receipt.num_tokens:
                    raise ValueError(f"request {number}: a token was lost or duplicated")
                receipt.add(len(message.delta.token_ids))

        yield ask


@asynccontextmanager
async def session_client(
    address: str, prompt_ids: Sequence[int], num_tokens: int, *, secret: str
) -> AsyncIterator[Ask]:
    """Make a client that calls a worker directly, one request at a time."""
    async with session_channels(None, secret=secret, cluster="default")(address) as channel:
        call = EngineServiceStub(channel).Session()  # type: ignore[no-untyped-call]
        await call.read()
        packed = pack_tokens(prompt_ids)

        async def ask(receipt: Receipt) -> None:
            number = receipt.number
            sampling = session_pb2.EngineSampling(max_tokens=num_tokens, seed=number)
            submit = session_pb2.Submit(
                handle=number, token_ids=packed, prompt_tokens=len(prompt_ids), sampling=sampling
            )
            receipt.sent = time.monotonic_ns()
            await call.write(session_pb2.ToWorker(submit=submit))
            while receipt.num_tokens < num_tokens:
                receipt.add(len((await call.read()).step.token_ids))

        yield ask
        call.cancel()


@asynccontextmanager
async def http_client(address: str, prompt: Callable[[int], str], num_tokens: int) -> AsyncIterator[Ask]:
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://{address}", connector=connector, timeout=timeout) as session:

        async def ask(receipt: Receipt) -> None:
            body = {
                "text": prompt(receipt.number),
                "sampling_params": {"max_new_tokens": num_tokens, "ignore_eos": True},
                "rid": str(receipt.number),
                "stream": True,
            }
            receipt.sent = time.monotonic_ns()
            async with session.post("/generate", json=body) as response:
                response.raise_for_status()
                async for events in _events(response.content):
                    receipt.add(num_tokens_in(events))

        yield ask


class _OpenAIStream(asyncio.Protocol):
    """Answer of OpenAI's API, read as cheaply as possible: client and router share the machine's cores."""

    def __init__(self, receipt: Receipt) -> None:
        self._receipt = receipt
        self._rest = b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        *events, self._rest = (self._rest + data).split(b"\n\n")
        self._receipt.add(sum(map(_num_token_ids, events)))
        if b"data: [DONE]" in data and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError(self._rest.decode()[:500]))


def _num_token_ids(event: bytes) -> int:
    ids = event.partition(b'"token_ids":[')[2].partition(b"]")[0]
    return ids.count(b",") + 1 if ids else 0


@asynccontextmanager
async def openai_client(address: str, prompt: Callable[[int], str], num_tokens: int) -> AsyncIterator[Ask]:
    """Make a client of /v1/completions with a connection for each request."""
    host, _, port = address.rpartition(":")

    async def ask(receipt: Receipt) -> None:
        fields = {
            "prompt": prompt(receipt.number),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "seed": receipt.number,
            "stream": True,
            "return_token_ids": True,
        }
        body = json.dumps(fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        receipt.sent = time.monotonic_ns()
        transport, stream = await asyncio.get_running_loop().create_connection(
            lambda: _OpenAIStream(receipt), host, int(port)
        )
        try:
            transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            async with asyncio.timeout(REQUEST_SECONDS):
                await stream.ended
        finally:
            transport.close()

    yield ask


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[list[bytes]]:
    """Yield the complete server-sent events of each piece of an answer, as it arrives."""
    rest = b""
    async for part in content.iter_any():
        *events, rest = (rest + part).split(b"\n\n")
        yield events


def num_tokens_in(events: Iterable[bytes]) -> int:
    """Count tokens by parsing the JSON, which a client needs to do for the text."""
    return sum(len(json.loads(event[6:])["output_ids"]) for event in events if event != b"data: [DONE]")
