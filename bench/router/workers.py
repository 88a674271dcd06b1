"""Four scripted workers behind real engine sessions, for the router benchmark.

    python -m bench.router.workers STEP_SECONDS TOKENIZER_FINGERPRINT [CONTEXT_TOKENS]

They compute nothing. Each running request gets one token per step, and all tokens of a worker are in one StepOutput.
They use the product's own Outbox, so that a slow router gets merged steps, as from a real worker.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any

import grpc
from blockyard.proto.security.tls import listen, session_server_credentials
from blockyard.proto.v1 import session_pb2
from blockyard.proto.v1.session_pb2_grpc import EngineServiceServicer, add_EngineServiceServicer_to_server
from blockyard.worker.engine_types import EngineLoad, SequenceOutput
from blockyard.worker.sequences.identifiers import RequestId
from blockyard.worker.sequences.phases import Phase, PhaseKind
from blockyard.worker.sequences.sequence import FinishReason, SequenceState
from blockyard.worker.session.outbox import Outbox

from bench.router.pace import NUM_WORKERS, Book, Running, Step, serve_workers
from bench.router.processes import SECRET_VARIABLE

BLOCK_SIZE = 16
CONTEXT_TOKENS = 16_384


def hello(number: int, tokenizer_fingerprint: str, context_tokens: int = CONTEXT_TOKENS) -> session_pb2.Hello:
    return session_pb2.Hello(
        worker_id=f"w{number}",
        incarnation=f"w{number}-life-1",
        model_fingerprint="model",
        tokenizer_fingerprint=tokenizer_fingerprint,
        block_size=BLOCK_SIZE,
        kv_dtype="float16",
        total_blocks=30_000,
        max_model_len=context_tokens,
        vocab_size=4096,
    )


class _Stream:
    """One router's session."""

    def __init__(self) -> None:
        self.running: dict[int, Running] = {}
        self.watched: set[int] = set()
        """Requests whose phases the router wants."""
        self.outbox = Outbox()
        self.has_news = asyncio.Event()

    def step(self, now: int) -> None:
        for handle, running in list(self.running.items()):
            offset = len(running.stamps.emitted)
            token = running.next_token(now)
            self.outbox.add(
                handle,
                SequenceOutput(
                    request_id=RequestId(handle),
                    token_ids=(token,),
                    token_offset=offset,
                    cached_tokens=0,
                    state=SequenceState.RUNNING,
                    finish_reason=FinishReason.LENGTH if running.is_over else None,
                ),
            )
            if handle in self.watched:
                self._report(handle, running, now)
            if running.is_over:
                del self.running[handle]
            self.has_news.set()

    def _report(self, handle: int, running: Running, now: int) -> None:
        """Report the phases that end with this token, as a worker does."""
        stamps = running.stamps
        first, here = ((at - stamps.arrived) / 1e9 for at in (stamps.emitted[0], now))
        if now == stamps.emitted[0]:
            self.outbox.report_phase(handle, Phase(PhaseKind.QUEUE, 0.0, first / 2, 0, 0))
            self.outbox.report_phase(handle, Phase(PhaseKind.PREFILL, first / 2, first, 1, 1))
        if running.is_over:
            num_tokens = len(stamps.emitted) - 1
            self.outbox.report_phase(handle, Phase(PhaseKind.DECODE, first, here, num_tokens, num_tokens))
            self.watched.discard(handle)

    def load(self) -> EngineLoad:
        nothing: dict[str, Any] = {setting.name: 0 for setting in fields(EngineLoad)}
        return EngineLoad(**nothing | {"running": len(self.running)})


class PacedWorker(EngineServiceServicer):
    """Part of EngineService that a router needs to stream. A request's seed is its number in the book."""

    def __init__(self, hello: session_pb2.Hello, book: Book) -> None:
        self._hello = hello
        self._book = book
        self._streams: set[_Stream] = set()

    async def step(self, now: int) -> None:
        for stream in self._streams:
            stream.step(now)

    async def Session(
        self, request_iterator: AsyncIterator[session_pb2.ToWorker], context: Any
    ) -> AsyncIterator[session_pb2.ToRouter]:
        stream = _Stream()
        self._streams.add(stream)
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            yield session_pb2.ToRouter(hello=self._hello)
            while await stream.has_news.wait():
                stream.has_news.clear()
                for message in stream.outbox.take(stream.load()):
                    yield message
        finally:
            self._streams.discard(stream)
            reader.cancel()

    async def _read(self, requests: AsyncIterator[session_pb2.ToWorker], stream: _Stream) -> None:
        async for message in requests:
            match message.WhichOneof("message"):
                case "submit":
                    submit = message.submit
                    stamps = self._book.arrived(submit.sampling.seed)
                    if submit.wants_phases:
                        stream.watched.add(submit.handle)
                    stream.running[submit.handle] = Running(submit.handle, submit.sampling.max_tokens, stamps)
                case "cancel":
                    stream.running.pop(message.cancel.handle, None)
                case "ping":
                    stream.outbox.answer_ping(message.ping.nonce, stream.load())
                    stream.has_news.set()


@asynccontextmanager
async def paced_worker(
    number: int, tokenizer_fingerprint: str, context_tokens: int, book: Book
) -> AsyncIterator[tuple[int, Step]]:
    worker = PacedWorker(hello(number, tokenizer_fingerprint, context_tokens), book)
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    add_EngineServiceServicer_to_server(worker, server)  # type: ignore[no-untyped-call]
    credentials = session_server_credentials(
        None, secret=os.environ.get(SECRET_VARIABLE, ""), cluster="default"
    )
    port = listen(server, "127.0.0.1:0", credentials)
    await server.start()
    try:
        yield port, worker.step
    finally:
        await server.stop(None)


async def main(step_seconds: float, tokenizer_fingerprint: str, context_tokens: int = CONTEXT_TOKENS) -> None:
    book = Book()
    workers = [
        paced_worker(number, tokenizer_fingerprint, context_tokens, book) for number in range(NUM_WORKERS)
    ]
    await serve_workers(workers, book, step_seconds)


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])))
