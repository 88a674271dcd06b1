"""`python -m blockyard.router` as an operator runs it."""

import asyncio
import os
import re
import signal
import sys

import grpc
from blockyard.proto.v1.inference_pb2_grpc import InferenceServiceStub

from .fake_worker import SECRET, expected_tokens
from .rig import MODEL, request, worker_of_model

START_SECONDS = 30.0


async def read_address(process: asyncio.subprocess.Process) -> str:
    """From the log line that says where the router serves."""
    assert process.stderr is not None
    async with asyncio.timeout(START_SECONDS):
        while line := (await process.stderr.readline()).decode():
            if found := re.search(r"router serving \S+ on (\S+)", line):
                return found[1]
    raise AssertionError("the router ended before it served")


async def test_sigterm_lets_a_running_stream_finish_and_exits_0() -> None:
    async with worker_of_model("a") as worker:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "blockyard.router", "--model", str(MODEL), "--worker", worker.address),
            env={**os.environ, "BLOCKYARD_CLUSTER_SECRET": SECRET},
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with grpc.aio.insecure_channel(await read_address(process)) as channel:
                wanted = request(prompt="hunter2", sampling={"max_tokens": 200})
                stream = InferenceServiceStub(channel).GenerateStream(wanted, wait_for_ready=True)
                tokens: list[int] = []
                async for message in stream:
                    if not tokens:
                        process.send_signal(signal.SIGTERM)
                    tokens += message.delta.token_ids
                assert tokens == expected_tokens(1, 200)
            async with asyncio.timeout(10):
                _, log = await process.communicate()
            assert process.returncode == 0
            assert b"Traceback" not in log
            assert b"hunter2" not in log
            assert SECRET.encode() not in log
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
