"""A router that is told to end finishes its streams over HTTP."""

import asyncio
import os
import re
import signal
import sys
import urllib.error
import urllib.request

import openai
import pytest
from openai import AsyncOpenAI

from tests.unit.openai.rig import HELLO, MODEL, SECRET, Script, expected_text, until, worker_of_model

NUM_STREAMS = 8
MAX_TOKENS = 150


async def test_a_router_that_is_told_to_end_finishes_every_stream_and_says_so_to_new_ones() -> None:
    async with worker_of_model("a", script=lambda submit: Script(step_seconds=0.02)) as worker:
        settings = {"model": str(MODEL), "model-name": "demo", "worker": worker.address, "http-port": "0"}
        options = [word for name, value in settings.items() for word in (f"--{name}", value)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "blockyard.router", *options),
            env={**os.environ, "BLOCKYARD_CLUSTER_SECRET": SECRET},
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stderr is not None
            log = (await asyncio.wait_for(process.stderr.readuntil(b"/v1\n"), 60)).decode()
            address = re.findall(r"http://(\S+)/v1", log)[0]
            async with AsyncOpenAI(base_url=f"http://{address}/v1", api_key="x", max_retries=0) as client:
                await until(lambda: has_status(address, 200), 30.0)
                begun: set[int] = set()
                streams = [asyncio.create_task(streamed(client, seed, begun)) for seed in range(NUM_STREAMS)]
                await until(lambda: len(begun) == NUM_STREAMS, 60.0)
                process.send_signal(signal.SIGTERM)
                await until(lambda: has_status(address, 503), 30.0)
                with pytest.raises(openai.InternalServerError) as refused:
                    await client.chat.completions.create(model="demo", messages=HELLO)
                assert (refused.value.status_code, refused.value.code) == (503, "router_draining")
                assert not any(stream.done() for stream in streams), "they were too short to prove anything"
                for seed, text in enumerate(await asyncio.gather(*streams)):
                    assert text == expected_text(seed, MAX_TOKENS)
            async with asyncio.timeout(30):
                _, rest = await process.communicate()
            assert process.returncode == 0
            assert b"Traceback" not in rest
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def has_status(address: str, status: int) -> bool:
    def found() -> int:
        try:
            with urllib.request.urlopen(f"http://{address}/health", timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    return await asyncio.to_thread(found) == status


async def streamed(client: AsyncOpenAI, seed: int, begun: set[int]) -> str:
    stream = await client.chat.completions.create(
        model="demo", messages=HELLO, max_tokens=MAX_TOKENS, seed=seed, stream=True
    )
    text = ""
    async for chunk in stream:
        begun.add(seed)
        text += chunk.choices[0].delta.content or ""
    return text
