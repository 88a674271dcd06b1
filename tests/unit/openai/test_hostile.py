"""Hostile bodies and headers get a clear message, with status 400 or the like, and the gateway goes on."""

import asyncio
import json
import logging
from typing import Any

import pytest
from blockyard.proto.limits import MAX_STRUCTURED_BYTES
from blockyard.router.openai.http import body
from blockyard.router.openai.requests.completion import MAX_PROMPTS, completion_wanted

from tests.pauses import free_loop

from .rig import CHAT, COMPLETIONS, HELLO, Answer, FakeWorker, Gateway, is_idle, read_answer, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

CANARY = "kanarien vogel"
MOST_LINES = 2000
"""Bound on the lines of Python in one callback of the event loop: far less than one for each byte of a large body."""
HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
VALID = json.dumps({"messages": HELLO, "max_tokens": 2}).encode()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"null",
        b'{"messages": NaN}',
        b'{"temperature": Infinity}',
        b'{"n": ' + b"9" * 10_000 + b"}",
        b"[" * 15_000,
        b'{"messages": ' + b"[" * 15_000 + b"]" * 15_000 + b"}",
        b'{"messages": [' + b"[]," * 30_000 + b"[]]}",
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
        b'{"messages": "' + CANARY.encode(),
        b'{"' + b"x" * 100_000 + b'": 1}',
        b'{"logit_bias": {"' + b"9" * 5000 + b'": 1}}',
    ],
    ids=lambda raw: f"{len(raw)}-{raw[:12]!r}",
)
async def test_what_is_no_request_is_answered_400(gateway: Gateway, worker: FakeWorker, raw: bytes) -> None:
    answer = await gateway.post(raw)
    assert answer.status == 400, answer
    told(answer)
    assert (await gateway.post(VALID)).status == 200


async def test_a_body_is_too_large_before_it_is_read(gateway: Gateway, worker: FakeWorker) -> None:
    declared = await gateway.raw(f"{HEAD}content-length: {10**15}\r\n\r\n".encode())
    assert (declared.status, declared.error["code"]) == (413, "body_too_large")
    endless = f"{HEAD}transfer-encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    answer = await gateway.raw(endless.encode() + chunk * 32)
    assert answer.status == 413


async def test_other_types_and_encodings_are_refused(gateway: Gateway) -> None:
    for headers in ({"content_type": "text/plain"}, {"content_type": ""}, {"content_encoding": "gzip"}):
        answer = await gateway.post(VALID, **headers)
        assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    "message",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        f"GET /{CANARY} HTTP/1.1\r\n\r\n".encode(),
        f"GET / HTTP/1.1\r\nbad header {CANARY}\r\n\r\n".encode(),
        b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 20_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n"
        + b"".join(b"x%d: y\r\n" % number for number in range(500))
        + b"\r\n",
        b"GET /" + b"y" * 20_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -7\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
    ids=lambda message: repr(message[:24]),
)
async def test_what_is_no_http_is_answered_and_told_to_no_log(
    gateway: Gateway, worker: FakeWorker, message: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        answer = await gateway.raw(message)
    assert 400 <= answer.status < 500
    assert answer.headers["server"] == "blockyard"
    assert answer.headers["x-request-id"].startswith("req-")
    told(answer)
    assert CANARY not in caplog.text
    assert "Traceback" not in caplog.text
    assert (await gateway.post(VALID)).status == 200


async def test_a_body_that_never_comes_holds_nothing(gateway: Gateway, worker: FakeWorker) -> None:
    connections = [await gateway.connect() for _ in range(20)]
    for _, writer in connections:
        writer.write(f"{HEAD}content-length: 100\r\n\r\n".encode() + b'{"mess')
    assert (await gateway.post(VALID)).status == 200
    for _, writer in connections:
        writer.close()
    await until(lambda: is_idle(gateway.router))


async def test_a_body_that_comes_too_slowly_or_breaks_is_refused_when_its_time_is_over(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "BODY_SECONDS", 0.2)
    answer = await gateway.post(VALID[:-1], content_length=str(len(VALID)))
    assert (answer.status, answer.error["code"]) == (408, "body_too_slow")
    reader, writer = await gateway.connect()
    writer.write(f"{HEAD}transfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n".encode())
    async with asyncio.timeout(10):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"no size\r\n")
        answer = await read_answer(reader)
    assert (answer.status, answer.error["code"]) == (408, "body_too_slow")
    writer.close()


@pytest.mark.parametrize("part", [b"[],", b'{"a":0},'])
async def test_parts_by_the_thousand_stop_nobody_else(
    gateway: Gateway, part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser would make an object of each, for seconds. It is not called."""
    raw = b'{"messages": [' + part * (500_000 // len(part)) + b"[]]}"
    with monkeypatch.context() as patch:
        patch.setattr(body.json, "loads", lambda *_, **__: pytest.fail("the body is parsed"))
        async with free_loop(MOST_LINES):
            answer = await gateway.post(raw)
    assert answer.status == 400
    assert f"at most {body.MAX_PARTS} objects, arrays and fields" in answer.error["message"]
    many = {"messages": [{"role": "user", "content": "[{:" * 300}], "max_tokens": 1}
    assert body.parse_json(json.dumps(many | {"user": "[" * 30_000}).encode(), most_values=9), (
        "in texts they are text"
    )


@pytest.mark.parametrize(
    ("raw", "refusal"),
    [
        (b"[" * 20_001 + b'"' + rb"\"" * 250_000, "must be JSON"),
        (b'{"a":' * 20_001 + b'"' + rb"\"" * 200_000, "must be JSON"),
        (b"[" * 20_001 + b'"' * 400_001, "must be JSON"),
        (b"[" * 20_001 + b"\\" * 500_001, "at most"),
        (b"[" * 20_001 + b'"' + b"\\" * 500_001, "must be JSON"),
        (b'"\\"' * 20_000 + b"[" * 20_001 + b'"a\\"b"' * 70_000, "at most"),
    ],
    ids=lambda value: f"{len(value)}-{value[-4:]!r}" if isinstance(value, bytes) else "",
)
async def test_strings_and_escapes_of_any_form_are_passed_in_linear_time(
    gateway: Gateway, raw: bytes, refusal: str
) -> None:
    """A search that starts again at each quote takes minutes for these, and all calls wait for it."""
    async with asyncio.timeout(60), free_loop(MOST_LINES):
        answer = await gateway.post(raw)
    assert answer.status == 400
    assert refusal in answer.error["message"]


@pytest.mark.parametrize(
    "parameters",
    [";" * 8000, ';x="' + '"' * 8000, ";a=b" * 2000, ";x=" + "(" * 8000],
    ids=lambda text: text[:4],
)
async def test_parameters_of_a_content_type_are_passed_over(gateway: Gateway, parameters: str) -> None:
    """A general parser runs many lines of Python for each, in time that is not linear, and fails for others."""
    async with free_loop(MOST_LINES):
        answer = await gateway.post(b"{}", content_type="application/json" + parameters)
    assert answer.status == 400


@pytest.mark.parametrize("text", ["[{:" * 9000, '"[{:' * 9000, "\\" * 9000 + "[" * 30_000, '\\"[{:' * 9000])
async def test_brackets_and_quotes_in_a_text_are_text(text: str) -> None:
    assert body.parse_json(json.dumps({"user": text}).encode(), most_values=9) == {"user": text}


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"session_id": "y" * 400_000}, "prompt", "too many prompts for fields as large"),
        ({"json_schema": "[" + "1," * 150_000 + "1]"}, "prompt", "too many prompts for fields as large"),
        ({"stop": [*([""] * 100_000), 7]}, "stop", "at most 16 are allowed"),
        ({"stop_token_ids": [*([1] * 100_000), "x"]}, "stop_token_ids", "at most 64 are allowed"),
        ({"logit_bias": dict.fromkeys(map(str, range(9000)), 1) | {"x": 1}}, "logit_bias", "at most 1024"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_what_is_too_much_is_refused_before_it_is_looked_through_or_copied_for_each_prompt(
    gateway: Gateway, fields: dict[str, Any], param: str, told: str
) -> None:
    """64 prompts with a million stop texts each took four seconds and a gigabyte."""
    answer = await gateway.post({"prompt": ["x"] * 64, **fields}, COMPLETIONS)
    assert (answer.status, answer.error["param"]) == (400, param), answer.error
    assert told in answer.error["message"]


async def test_as_many_prompts_as_there_may_be_have_room_for_the_largest_schema() -> None:
    schema = '{"enum":["' + "y" * (MAX_STRUCTURED_BYTES - 13) + '"]}'
    assert len(schema) == MAX_STRUCTURED_BYTES
    wanted = completion_wanted({"prompt": ["x"] * MAX_PROMPTS, "json_schema": schema})
    assert len(wanted.requests) == MAX_PROMPTS


async def test_expect_continue_is_heard_before_the_body(gateway: Gateway, worker: FakeWorker) -> None:
    reader, writer = await gateway.connect()
    writer.write(f"{HEAD}content-length: {len(VALID)}\r\nexpect: 100-continue\r\n\r\n".encode())
    async with asyncio.timeout(10):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(VALID)
        assert (await read_answer(reader)).status == 200
    writer.close()


def told(answer: Answer) -> None:
    """An error in OpenAI's shape that is a sentence of ours."""
    assert CANARY not in answer.body.decode()
    assert len(answer.error["message"]) < 400
    assert "Traceback" not in answer.error["message"]
