"""What a link's channel promises the worker at the other end."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from blockyard.router.engine_link import CHANNEL_OPTIONS

MESSAGE_BYTES = 1024


async def test_a_router_that_reads_nothing_holds_the_workers_writes_back_soon() -> None:
    """Else steps pile up inside gRPC, where the worker cannot merge them."""
    num_written = 0

    async def flood(request: bytes, context: Any) -> AsyncIterator[bytes]:
        nonlocal num_written
        while True:
            yield b"x" * MESSAGE_BYTES
            num_written += 1

    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler(
        "T", {"Flood": grpc.unary_stream_rpc_method_handler(flood)}
    )
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
            call = channel.unary_stream("/T/Flood")(b"")
            for _ in range(2000):
                await call.read()
            num_read = 2000
            await asyncio.sleep(0.5)
            written_at_rest = num_written
            await asyncio.sleep(0.2)
            assert num_written == written_at_rest, "the writer still writes"
            ahead = written_at_rest - num_read
            print(f"{ahead} messages of {MESSAGE_BYTES} bytes were written ahead of a reader that stopped")
            assert ahead * MESSAGE_BYTES <= 256 * 1024
            call.cancel()
    finally:
        await server.stop(None)
