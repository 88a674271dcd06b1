"""Four scripted HTTP workers that stream as SGLang's /generate does, for sglang-router beside our router.

    python -m bench.router.peers STEP_SECONDS

They equal those of workers.py in pace and count: each running request gets one token per step. With HTTP, each request
is a stream of its own, so a step is one event per request instead of one message for all.
"""

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from bench.router.pace import NUM_WORKERS, Book, Running, Step, serve_workers

MAX_BODY_BYTES = 16 * 2**20
FACTS_PATHS = (
    "/health",
    "/health_generate",
    "/server_info",
    "/get_server_info",
    "/get_model_info",
    "/model_info",
)


class PacedHttpWorker:
    """SGLang's /generate with `stream: true`, and the other paths that its router calls.

    A request's `rid` is its number in the book.
    """

    def __init__(self, book: Book) -> None:
        self._book = book
        self._running: dict[Running, tuple[web.StreamResponse, asyncio.Event]] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/generate", self._generate)
        for path in FACTS_PATHS:
            app.router.add_get(path, self._facts)
        return app

    async def step(self, now: int) -> None:
        for running, (response, over) in list(self._running.items()):
            token = running.next_token(now)
            has_gone = False
            try:
                await response.write(event(running, token))
            except ConnectionError:
                has_gone = True
            if running.is_over or has_gone:
                del self._running[running]
                over.set()

    async def _facts(self, request: web.Request) -> web.Response:
        return web.json_response({"is_generation": True})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = int(body["rid"])
        running = Running(number, body["sampling_params"]["max_new_tokens"], self._book.arrived(number))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        over = asyncio.Event()
        self._running[running] = (response, over)
        await over.wait()
        return response


def event(running: Running, token: int) -> bytes:
    """Format one token as SGLang does. After the last token, add the stream's end."""
    num_tokens = len(running.stamps.emitted)
    finish = {"type": "length", "length": num_tokens} if running.is_over else None
    meta = {"id": str(running.handle), "finish_reason": finish, "completion_tokens": num_tokens}
    message = {"text": " return", "output_ids": [token], "meta_info": meta}
    end = "data: [DONE]\n\n" if running.is_over else ""
    return f"data: {json.dumps(message)}\n\n{end}".encode()


@asynccontextmanager
async def paced_http_worker(book: Book) -> AsyncIterator[tuple[int, Step]]:
    worker = PacedHttpWorker(book)
    runner = web.AppRunner(worker.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1], worker.step
    finally:
        await runner.cleanup()


async def main(step_seconds: float) -> None:
    # sglang-router first tries gRPC, which aiohttp would log as an invalid request.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    book = Book()
    await serve_workers([paced_http_worker(book) for _ in range(NUM_WORKERS)], book, step_seconds)


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1])))
