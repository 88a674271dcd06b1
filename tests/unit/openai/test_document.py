"""The API's document is true: what it allows is taken, what it does not is refused by its field, and nothing else
happens."""

import html.parser
import json
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
import requests
import schemathesis
from blockyard.proto.naming.pooling import Pooling
from blockyard.router.errors import RouterError
from blockyard.router.openai.anthropic import request as anthropic
from blockyard.router.openai.http.errors import error_body
from blockyard.router.openai.openapi import PATHS, RESPONSES, body_schema, document, page
from blockyard.router.openai.requests import chat, completion, embedding
from blockyard.router.openai.requests.fields import Body
from blockyard.router.openai.requests.wanted import Wanted
from blockyard.router.openai.responses import request as responses
from blockyard.router.openai.responses.items import Surroundings
from blockyard.router.parsing.formats import NO_FORMAT
from blockyard.router.request.chats import valid_chat
from blockyard.router.request.sampling_checks import SamplingLimits
from blockyard.router.request.validation import valid_embedding, valid_generation
from hypothesis import given
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.properties import examples
from tests.unit.router.facts import FACTS

from .rig import CHAT, COMPLETIONS, HELLO, Answer, Gateway, Script, running_gateway, worker_of_model

EMBEDDER = replace(FACTS, pooling=Pooling(normalizes=True), embedding_size=64)
LIMITS = SamplingLimits()
DOCUMENT = document("1.2.3")
OPERATIONS: list[Any] = [
    found.ok() for found in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()
]
NEVER_SAID = re.compile(r"Traceback|\.py\b|Exception|\w+Error\b|<class|object at 0x")

# Over HTTP: every operation of the document.


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """A gateway that has every route, and whose worker says one token."""
    worker = worker_of_model("a", script=lambda submit: Script(stop_token_at=1))
    folder = str(tmp_path_factory.mktemp("batches"))
    async with running_gateway(batch_dir=folder) as running, running.router.workers(worker):
        yield running


async def sent(gateway: Gateway, case: Any) -> Answer:
    prepared = requests.Request(**case.as_transport_kwargs(base_url="http://x")).prepare()
    body: Any = prepared.body or b""
    raw: bytes = body.encode() if isinstance(body, str) else body
    head = f"{prepared.method} {prepared.path_url} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n"
    kind = prepared.headers.get("content-type")
    return await gateway.raw(
        head.encode() + (f"content-type: {kind}\r\n" if kind else "").encode() + b"\r\n" + raw
    )


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda found: f"{found.method.upper()} {found.path}")
@examples(25)
@given(data=st.data())
@pytest.mark.asyncio(loop_scope="module")
async def test_every_operation_is_answered_as_the_document_says(
    whole: Gateway, operation: Any, data: st.DataObject
) -> None:
    modes = [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if operation.body else [])]
    for mode in modes:
        answer = await sent(whole, data.draw(operation.as_strategy(generation_mode=mode)))
        assert answer.status < (500 if mode is GenerationMode.POSITIVE else 430), answer
        check_answer(operation, answer)
        assert answer.status >= 400 or mode is GenerationMode.POSITIVE


def check_answer(operation: Any, answer: Answer) -> None:
    told = DOCUMENT["paths"][operation.path][operation.method]["responses"]
    if answer.status < 400:
        assert answer.headers["content-type"].partition(";")[0] in told["200"]["content"]
        return
    name = told["default"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    body = json.loads(answer.body)
    jsonschema.validate(body, DOCUMENT["components"]["schemas"][name])
    assert not NEVER_SAID.search(body["error"]["message"])
    assert len(body["error"]["message"]) < 400


# Without HTTP: every field of the bodies.


class Refused(Exception):
    """A refusal, with the names that the route has for fields."""

    def __init__(self, error: RouterError, names: Mapping[str, str]) -> None:
        self.param = error_body(error, names)["error"]["param"]


def generations(parse: Callable[[Body], Wanted]) -> Callable[[Body], object]:
    def check(body: Body) -> None:
        wanted = parse(body)
        try:
            for request in wanted.requests:
                valid_generation(request, FACTS, max_model_len=100, limits=LIMITS)
        except RouterError as error:
            raise Refused(error, wanted.names) from None

    return check


def response_wanted(body: Body) -> Wanted:
    request = responses.read_request(body)
    items = request.items(Surroundings(response_id="resp_1"))
    return request.wanted(items, NO_FORMAT, can_store=False, can_seal=False)


def check_embedding(body: Body) -> None:
    for request in embedding.embeddings_wanted(body).requests:
        valid_embedding(request, EMBEDDER, max_model_len=100)


ROUTES: list[tuple[str, Callable[[Body], object], Mapping[str, str], dict[str, Any]]] = [
    (CHAT, generations(chat.chat_wanted), chat.NAMES, {"messages": HELLO}),
    (COMPLETIONS, generations(completion.completion_wanted), completion.NAMES, {"prompt": "x"}),
    ("/v1/embeddings", check_embedding, embedding.NAMES, {"input": "x"}),
    (RESPONSES, generations(response_wanted), responses.NAMES, {"input": "x"}),
    (
        "/v1/messages",
        generations(anthropic.messages_wanted),
        anthropic.NAMES,
        {"messages": HELLO, "max_tokens": 9},
    ),
    (
        "/v1/messages/count_tokens",
        lambda body: valid_chat(anthropic.counted_chat(body, NO_FORMAT)),
        anthropic.NAMES,
        {"messages": HELLO},
    ),
]
BESIDE = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}
"""Fields that a field needs beside it."""
SAMPLES: list[Any] = [
    *(
        None,
        True,
        False,
        -3,
        -1,
        0,
        1,
        2,
        25,
        2**40,
        2**63,
        10**400,
        0.5,
        -0.5,
        1000.5,
        "",
        "x",
        "auto",
        "none",
    ),
    *([], {}, ["a"], [1], [[1]], [""], ["a", 1], {"1": 1}, {"a": 1}, {"type": "text"}, {"choice": ["a"]}),
    *("\ud800", "two words", "snow\u2603man", {"two words": 1}, {"nobody": 1}, {"include_usage": 1}),
    *({"include_usage": True}, {"json": {}, "regex": None}, {"role": "user"}),
    [{"role": "user", "content": "x"}],
    [{"role": "user", "content": 1}],
    [{"role": "king", "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [{"role": "user"}],
]
NOT_SAID = {
    # Limits and names of this router, its model and its chat template.
    *("model", "n", "beam_width", "dimensions", "logit_bias", "reasoning_effort"),
    # Fields that depend on others.
    *("tool_choice", "continue_final_message", "min_tokens"),
    # Texts that are JSON themselves.
    *("json_schema", "guided_json"),
}
"""Fields of which the document cannot say all that is refused."""


def edges(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield values at the bounds of a schema and beyond them."""
    yield from schema.get("enum", ())
    for bound in ("minimum", "maximum", "exclusiveMinimum"):
        if bound in schema:
            yield from (schema[bound] + step for step in (-1, 0, 1))
    for most in (schema.get("maxLength"), schema.get("maxItems")):
        for length in () if most is None else (most, most + 1):
            yield from ("x" * length, ["x"] * length, [1] * length)
    if "maxProperties" in schema:
        yield from ({str(key): 1 for key in range(schema["maxProperties"] + extra)} for extra in (0, 1))


def samples(schema: Mapping[str, Any]) -> Iterable[Any]:
    unique = {json.dumps(value): value for value in (*SAMPLES, *edges(schema))}
    return unique.values()


def schema_of(path: str) -> dict[str, Any]:
    fields = PATHS[path].fields
    assert fields is not None
    return body_schema(fields, PATHS[path].required)


def refused_field(check: Callable[[Body], object], body: Body, names: Mapping[str, str]) -> str | None:
    try:
        check(body)
    except Refused as refused:
        return str(refused.param)
    except RouterError as error:
        return str(error_body(error, names)["error"]["param"])
    return None


@pytest.mark.parametrize(
    ("path", "check", "names", "base"), ROUTES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_each_field_takes_what_the_document_allows_and_is_named_where_it_does_not(
    path: str, check: Callable[[Body], object], names: Mapping[str, str], base: dict[str, Any]
) -> None:
    schema = schema_of(path)
    for name, described in schema["properties"].items():
        validator = jsonschema.Draft202012Validator(described)
        beside = {
            other: value for other, value in BESIDE.get(name, {}).items() if other in schema["properties"]
        }
        for sample in samples(described):
            body = {**base, **beside, name: sample}
            field = refused_field(check, body, names)
            if "\\ud800" in json.dumps(sample):
                assert field is not None, "no character"
            elif not validator.is_valid(sample) and (name, json.dumps(sample)) != ("best_of", "1"):
                assert field is not None, (name, sample)
            elif name not in NOT_SAID:
                assert field is None, (name, sample, field)
            assert field is None or re.match(rf"{name}\b", field), (name, sample, field)


@pytest.mark.parametrize("path", [path for path, described in PATHS.items() if described.fields])
def test_each_body_is_described_field_by_field(path: str) -> None:
    schema = schema_of(path)
    jsonschema.Draft202012Validator.check_schema(schema)
    untold = {name for name, told in schema["properties"].items() if "description" not in told}
    assert untold <= {"stream_options", "messages", "logprobs", "tokens"}
    assert not jsonschema.Draft202012Validator(schema).is_valid({"nobody_knows": 1})


def test_the_document_names_every_path() -> None:
    assert (DOCUMENT["paths"].keys(), DOCUMENT["info"]["version"]) == (PATHS.keys(), "1.2.3")


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def test_the_page_has_every_field_and_loads_and_runs_nothing() -> None:
    tags, shown = Tags(), page("1<script>")
    tags.feed(shown)
    harmless = {"html", "meta", "title", "style", "h1", "h2", "p", "code", "table", "tr", "th", "td"}
    assert {tag for tag, _ in tags.seen} <= harmless
    assert not [attrs for _, attrs in tags.seen if attrs.keys() & {"src", "href", "style", "onload"}]
    fields = {name for described in PATHS.values() for name in described.fields or ()}
    assert not [name for name in fields if f"<code>{name}</code>" not in shown]


@pytest.mark.asyncio(loop_scope="module")
async def test_both_are_served_and_each_path_names_its_verbs(whole: Gateway) -> None:
    answer = await whole.get("/openapi.json")
    assert answer.headers["content-type"].startswith("application/json")
    made = json.loads(answer.body)
    assert made == json.loads(json.dumps(document(made["info"]["version"])))
    for path, described in PATHS.items():
        wrong = await whole.get(path, verb="PUT")
        assert (wrong.status, wrong.headers["allow"]) == (405, ", ".join(described.verbs))
    shown = await whole.get("/docs")
    policy = shown.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert len(re.findall(rb"<style>", shown.body)) == 1
