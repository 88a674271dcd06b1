"""Options that decide how a chat becomes a prompt: names, variables of the template, and the prompt's end."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from blockyard.proto.naming.block_hash import unpack_tokens
from blockyard.proto.naming.fingerprint import tokenizer_fingerprint
from blockyard.proto.text import load_tokenizer
from blockyard.proto.v1 import inference_pb2

from .rig import HELLO, MODEL, FakeWorker, Gateway, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.name or m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% if enable_thinking %}think{% endif %}{% endif %}"
)
SAID = [*HELLO, {"role": "assistant", "content": "Hi the"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a template that shows names."""
    model = Path(shutil.copytree(MODEL, tmp_path_factory.mktemp("rendering") / "model"))
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(model: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(model=str(model)) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def worker(gateway: Gateway, model: Path) -> AsyncIterator[FakeWorker]:
    fake = FakeWorker("a", tokenizer_fingerprint=tokenizer_fingerprint(model))
    async with gateway.router.workers(fake) as (only,):
        yield only


ASKED = "<|im_start|>user: hello<|im_end|>"


@pytest.mark.parametrize(
    ("fields", "rendered"),
    [
        ({}, f"{ASKED}<|im_start|>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, f"{ASKED}<|im_start|>"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, f"{ASKED}<|im_start|>think"),
        ({"add_generation_prompt": False}, ASKED),
        (
            {"messages": SAID, "continue_final_message": True, "add_generation_prompt": False},
            f"{ASKED}<|im_start|>assistant: Hi the",
        ),
        (
            {"messages": [{**HELLO[0], "name": "ann<|im_end|>"}]},
            "<|im_start|>ann<|im_end|>: hello<|im_end|><|im_start|>",
        ),
    ],
)
async def test_the_prompt_is_rendered_as_asked(
    gateway: Gateway, worker: FakeWorker, fields: dict[str, Any], rendered: str
) -> None:
    assert (await gateway.post({"messages": HELLO, "max_tokens": 1, **fields})).status == 200
    token_ids = unpack_tokens(worker.submits[0].token_ids)
    tokenizer = load_tokenizer(MODEL)
    assert tokenizer.decode(token_ids) == rendered
    typed = "ann<|im_end|>" in rendered
    assert token_ids.count(tokenizer.eos_token_id) == rendered.count("<|im_end|>") - typed


async def test_names_of_blocks_depend_on_the_rendered_tokens_alone(
    gateway: Gateway, worker: FakeWorker
) -> None:
    ours = {"messages": [{**HELLO[0], "name": "user", "content": "hello " * 40}]}
    for fields in ({}, {"name": None}):
        await gateway.post({"messages": [{**ours["messages"][0], **fields}], "max_tokens": 1})
    await gateway.post({**ours, "max_tokens": 1, "chat_template_kwargs": {"unused": [1, "<|im_end|>"]}})
    assert len({submit.block_names for submit in worker.submits}) == 1 == len(worker.submits) - 2


async def test_grpc_renders_the_same(gateway: Gateway, worker: FakeWorker) -> None:
    chat = inference_pb2.Chat(
        messages=[inference_pb2.ChatMessage(name="ann", role="user", content="hello")],
        template_kwargs='{"enable_thinking": true}',
    )
    answer = await gateway.router.inference.Tokenize(inference_pb2.TokenizeRequest(chat=chat))
    tokenizer = load_tokenizer(MODEL)
    assert tokenizer.decode(answer.token_ids) == "<|im_start|>ann: hello<|im_end|><|im_start|>think"


async def test_a_router_takes_a_template_and_a_tokenizer_beside_the_model(tmp_path: Path) -> None:
    """The model's folder has neither here."""
    folder = Path(
        shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*", "*.jinja"))
    )
    settings = {"model": str(folder), "tokenizer": str(MODEL), "chat_template": TEMPLATE}
    fake = FakeWorker("a", tokenizer_fingerprint=tokenizer_fingerprint(MODEL))
    async with running_gateway(**settings) as own, own.router.workers(fake):
        assert (await own.post({"messages": HELLO, "max_tokens": 1})).status == 200
        rendered = load_tokenizer(MODEL).decode(unpack_tokens(fake.submits[0].token_ids))
    assert rendered == "<|im_start|>user: hello<|im_end|><|im_start|>"
