"""A router with its gateway and scripted workers, OpenAI's and Anthropic's clients, and plain HTTP."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from anthropic import AsyncAnthropic
from blockyard.proto.naming.block_hash import unpack_tokens
from blockyard.proto.text import IncrementalDetokenizer, load_tokenizer
from blockyard.router.admission.ledger import AdmissionLedger
from openai import AsyncOpenAI
from openai.types import Batch, FileObject
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

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
CLIENT: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 20.0}


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
        return AsyncOpenAI(**{**CLIENT, "base_url": f"http://{self.address}/v1", **options})

    def claude(self, **options: Any) -> AsyncAnthropic:
        return AsyncAnthropic(**{**CLIENT, "base_url": f"http://{self.address}", **options})

    async def post(self, body: Any, path: str = CHAT, **headers: str) -> Answer:
        """`body`: bytes as they are, anything else as JSON. Underscores in names of headers are hyphens."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"content-type": "application/json", "content-length": str(len(raw))}
        named |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in named.items() if value)
        return await self.raw(f"POST {path} HTTP/1.1\r\nhost: x\r\n{head}\r\n".encode() + raw)

    async def get(self, path: str, verb: str = "GET", **headers: str) -> Answer:
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        return await self.raw(f"{verb} {path} HTTP/1.1\r\nhost: x\r\n{lines}\r\n".encode())

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


def ledger_of(gateway: Gateway) -> AdmissionLedger:
    groups = gateway.router.server._groups
    assert groups is not None
    return groups.default.parts.ledger


def text_of(token_ids: list[int]) -> str:
    detokenizer = IncrementalDetokenizer(load_tokenizer(MODEL))
    return detokenizer.push(token_ids) + detokenizer.finish()


def expected_text(seed: int, count: int, index: int = 0) -> str:
    """Return the text that every worker generates."""
    return text_of(expected_tokens(seed, count, index))


EOS = 2
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}
WEATHER: dict[str, Any] = {"type": "function", "function": FUNCTION}
FLAT_WEATHER: dict[str, Any] = {"type": "function", **FUNCTION, "strict": False}
"""The same as a tool of a response."""
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add"}}
STRICT = {**WEATHER, "function": {**FUNCTION, "strict": True}}
TOOLS = [WEATHER, ADD]
ARGUMENTS = '{"city": "Zürich 🌧"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}{{ '\\n' }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if tools %}<tool_call>{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}"
    "<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Like those of Qwen3's thinking models: the prompt begins the reasoning."""


CLAUDES_WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather.",
    "input_schema": SCHEMA,
}
CLAUDES_ADD: dict[str, Any] = {"name": "add", "input_schema": {"type": "object"}}
TEXT = {"type": "text", "text": "x"}
TOOL_USE = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}


def turns(*contents: Any) -> dict[str, Any]:
    """Messages of user and assistant by turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]}


def says(worker: FakeWorker, text: str, *, is_cut: bool = False) -> None:
    """Let the worker's next outputs be this text, cut by `max_tokens` or ended by the model."""
    tokens = [*load_tokenizer(MODEL).encode(text, add_special_tokens=False), *([] if is_cut else [EOS])]
    ending = {"lengths": (len(tokens),) * 4} if is_cut else {"stop_token_at": len(tokens)}
    worker.script = lambda submit: Script(tokens=tuple(tokens), **ending)  # type: ignore[arg-type]


def prompt_of(worker: FakeWorker) -> str:
    return str(load_tokenizer(MODEL).decode(unpack_tokens(worker.submits[-1].token_ids)))


ENDED = {"completed", "failed", "expired", "cancelled"}


def line(custom_id: str, *, url: str = CHAT, **fields: Any) -> dict[str, Any]:
    given = {"messages": HELLO} if url == CHAT else {"prompt": "def f("}
    body = {"model": "demo", "max_tokens": 3, **given, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(*lines: Any) -> bytes:
    return b"".join(one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in lines)


async def uploaded(client: AsyncOpenAI, content: bytes) -> FileObject:
    return await client.files.create(file=("in.jsonl", content), purpose="batch")


async def started(client: AsyncOpenAI, content: bytes, endpoint: Any = CHAT, **more: Any) -> Batch:
    source = await uploaded(client, content)
    return await client.batches.create(
        input_file_id=source.id, endpoint=endpoint, completion_window="24h", **more
    )


async def ended(client: AsyncOpenAI, batch: Batch) -> Batch:
    async with asyncio.timeout(150):
        while True:
            batch = await client.batches.retrieve(batch.id)
            if batch.status in ENDED:
                return batch
            await asyncio.sleep(0.02)


async def answers(client: AsyncOpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    assert file_id is not None
    text = (await client.files.content(file_id)).text
    found = [json.loads(one) for one in text.splitlines()]
    by_id = {one["custom_id"]: one for one in found}
    assert len(by_id) == len(found), "each once"
    return by_id


RESPONSES = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


async def events_of(gateway: Gateway, **asked: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which is what OpenAI's types say."""
    body = {"model": "demo", "input": "hello", **asked, "stream": True}
    found = []
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{gateway.address}{RESPONSES}", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        for block in (await answer.text()).removesuffix("\n\n").split("\n\n"):
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            EVENT.validate_python(event, strict=True)
            found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def told(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the output that the events of a stream add up to, item by item."""
    output: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(output)
            output.append({**event["item"], "text": "", "summed_up": ""})
            continue
        if "output_index" not in event:
            continue
        item = output[event["output_index"]]
        assert event.get("item_id", item["id"]) == item["id"]
        part = "summed_up" if "summary" in kind else "text"
        match kind.rpartition(".")[2]:
            case "added":
                assert event["part"]["text"] == ""
            case "delta":
                item[part] += event["delta"]
            case "done" if kind == "output_item.done":
                whole = event["item"]
                text = whole.get("arguments") or "".join(one["text"] for one in whole.get("content", ()))
                summary = "".join(one["text"] for one in whole.get("summary", ()))
                assert (whole["id"], text, summary) == (item["id"], item["text"], item["summed_up"])
            case "done":
                ended = event.get("text", event.get("arguments", event.get("part", {}).get("text")))
                assert ended == item[part]
    return output


EMBEDDINGS = "/v1/embeddings"
SIZE = 64


def embedding_folder(folder: Path) -> Path:
    """Fill a folder with the demo model's tokenizer and the files that make a model embed. Without weights."""
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | {"hidden_size": SIZE}
    (folder / "config.json").write_text(json.dumps(config))
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": kinds[kind]} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return folder


@asynccontextmanager
async def running_embedder(folder: Path, **settings: Any) -> AsyncIterator[Gateway]:
    async with running_gateway(model=str(embedding_folder(folder)), **settings) as gateway:
        yield gateway
