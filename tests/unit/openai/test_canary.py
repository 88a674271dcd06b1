"""Content that clients send over HTTP is in no log: of good, refused and broken calls, and of a worker that dies."""

import asyncio
import json
import logging
from typing import Any

import pytest

from .rig import CHAT, COMPLETIONS, Gateway, Script, is_idle, running_gateway, until, worker_of_model

CANARY = "kanarienvogel7Zq9"
SAID = [{"role": "user", "content": f"The {CANARY} sings."}]


async def test_no_log_says_what_a_client_sent(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.get_running_loop().set_debug(True)
    with caplog.at_level(logging.DEBUG):
        async with running_gateway(max_requests=2) as gateway:
            async with gateway.router.workers(worker_of_model("a")):
                for body, path in calls():
                    await gateway.post(body, path)
                await gateway.post({"messages": SAID}, f"/v1/{CANARY}", authorization=f"Bearer {CANARY}")
                await gateway.get(f"/v1/models/{CANARY}")
                await gateway.raw(f"GET / HTTP/1.1\r\nbroken {CANARY}\r\n\r\n".encode())
                await gateway.raw(f"{CANARY}\r\n\r\n".encode())
            await through_a_death(gateway)
            await until(lambda: is_idle(gateway.router))
    assert CANARY not in caplog.text
    assert "lost worker" in caplog.text, "nothing was logged at all?"


def calls() -> list[tuple[Any, str]]:
    chat = {"messages": SAID, "max_tokens": 3}
    return [
        *((chat | {"stream": stream}, CHAT) for stream in (False, True)),
        ({"prompt": [CANARY, CANARY], "max_tokens": 3, "stop": CANARY}, COMPLETIONS),
        *(
            (chat | {field: CANARY}, CHAT)
            for field in ("model", "regex", "user", "session_id", "seed", "n", CANARY)
        ),
        (chat | {"messages": [{**SAID[0], "name": CANARY}], "chat_template_kwargs": {CANARY: CANARY}}, CHAT),
        (chat | {"chat_template_kwargs": {"messages": CANARY}}, CHAT),
        (chat | {"bad_words": [CANARY], "guided_choice": [CANARY], "metadata": {CANARY: CANARY}}, CHAT),
        ({"prompt": CANARY, "return_token_strs": True}, "/tokenize"),
        ({"tokens": [CANARY]}, "/detokenize"),
        (chat | {"json_schema": {CANARY: [CANARY]}}, CHAT),
        (chat | {"n": 3, "temperature": -1}, CHAT),
        (json.dumps(chat)[:-2].encode(), CHAT),
        *((chat | {"stream": stream, "system": CANARY}, "/v1/messages") for stream in (False, True)),
        *(
            (chat | {field: CANARY}, "/v1/messages")
            for field in ("system", "thinking", "tools", "tool_choice", "stop_sequences", CANARY)
        ),
        ({"messages": [{"role": CANARY, "content": CANARY}]}, "/v1/messages/count_tokens"),
        (CANARY.encode(), CHAT),
    ]


async def through_a_death(gateway: Gateway) -> None:
    dying = worker_of_model("a", script=lambda submit: Script(exit_after=4, step_seconds=0.02))
    async with gateway.router.workers(dying):
        await gateway.post({"messages": SAID, "max_tokens": 20}, blockyard_timeout_seconds="1")
