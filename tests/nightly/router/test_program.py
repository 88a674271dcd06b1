"""Routers in processes of their own: SIGTERM under load, and two that share a port."""

import asyncio
import os
import re
import signal
from typing import Any

import grpc
from blockyard.proto.v1.inference_pb2_grpc import InferenceServiceStub
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.unit.router.fake_worker import SECRET, Script, expected_tokens
from tests.unit.router.rig import MODEL, ROUTER, reason_of, refused, request, until, worker_of_model

NUM_STREAMS = 16
MAX_TOKENS = 150
START_SECONDS = 30.0
NOT_SERVING, SERVING = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING


async def read_address(process: asyncio.subprocess.Process) -> str:
    """From the log line that says where the router serves."""
    assert process.stderr is not None
    async with asyncio.timeout(START_SECONDS):
        while line := (await process.stderr.readline()).decode():
            if found := re.search(r"router serving \S+ on (\S+)", line):
                return found[1]
    raise AssertionError("the router ended before it served")


async def tokens_of(inference: Any, seed: int, begun: set[int]) -> list[int]:
    wanted = request("hunter2", sampling={"max_tokens": MAX_TOKENS, "seed": seed})
    tokens: list[int] = []
    async for message in inference.GenerateStream(wanted, wait_for_ready=True, timeout=120):
        tokens += message.delta.token_ids
        begun.add(seed)
    return tokens


async def test_a_router_that_is_told_to_end_finishes_every_stream_takes_nothing_new_and_exits_0() -> None:
    async with worker_of_model("a") as one, worker_of_model("b") as other:
        for worker in (one, other):
            worker.script = lambda submit: Script(step_seconds=0.02)
        process = await asyncio.create_subprocess_exec(
            *(*ROUTER, "--model", str(MODEL), "--worker", one.address, "--worker", other.address),
            env={**os.environ, "BLOCKYARD_CLUSTER_SECRET": SECRET},
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with grpc.aio.insecure_channel(await read_address(process)) as channel:
                inference = InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
                health = health_pb2_grpc.HealthStub(channel)

                async def health_is(status: int) -> bool:
                    return bool((await health.Check(health_pb2.HealthCheckRequest())).status == status)

                await until(lambda: health_is(SERVING), 30.0)
                begun: set[int] = set()
                streams = [
                    asyncio.create_task(tokens_of(inference, seed, begun)) for seed in range(NUM_STREAMS)
                ]
                await until(lambda: len(begun) == NUM_STREAMS, 60.0)
                process.send_signal(signal.SIGTERM)
                await until(lambda: health_is(NOT_SERVING), 30.0)
                error = await refused(inference.GenerateStream(request(), timeout=10))
                assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "ROUTER_DRAINING")
                assert not any(stream.done() for stream in streams), "they were too short to prove anything"
                for seed, tokens in enumerate(await asyncio.gather(*streams)):
                    assert tokens == expected_tokens(seed, MAX_TOKENS)
            async with asyncio.timeout(30):
                _, log = await process.communicate()
            assert process.returncode == 0
            for secret in (b"Traceback", b"hunter2", SECRET.encode()):
                assert secret not in log
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_two_routers_share_a_port_and_tell_how_late_their_loops_were() -> None:
    async with worker_of_model("a") as worker:
        command = (*ROUTER, "--model", str(MODEL), "--worker", worker.address, "--reuse-port")
        environment = {**os.environ, "BLOCKYARD_CLUSTER_SECRET": SECRET}
        processes: list[asyncio.subprocess.Process] = []
        try:
            port = "0"
            for _ in range(2):
                process = await asyncio.create_subprocess_exec(
                    *command, "--port", port, env=environment, stderr=asyncio.subprocess.PIPE
                )
                processes.append(process)
                port = (await read_address(process)).rpartition(":")[2]
            for process in processes:
                process.send_signal(signal.SIGUSR1)
                assert process.stderr is not None
                async with asyncio.timeout(10):
                    while b"ticks late" not in (line := await process.stderr.readline()):
                        assert line, "it ended"
                process.terminate()
                async with asyncio.timeout(10):
                    _, rest = await process.communicate()
                assert process.returncode == 0
                assert b"router stopped; event loop: " in rest
                assert b"leaked" not in rest
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
