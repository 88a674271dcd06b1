"""The API's document agrees with the checks for every field, and its page loads and runs nothing."""

import html.parser
import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from blockyard.router.errors import InvalidRequest, RouterError
from blockyard.router.openai.anthropic.errors import anthropic_error
from blockyard.router.openai.anthropic.request import messages_wanted
from blockyard.router.openai.openapi import PATHS, RESPONSES, body_schema, document, page
from blockyard.router.openai.requests.chat import chat_wanted
from blockyard.router.openai.requests.completion import completion_wanted
from blockyard.router.openai.requests.fields import Body
from blockyard.router.openai.requests.wanted import Wanted
from blockyard.router.openai.responses.items import Surroundings
from blockyard.router.openai.responses.request import read_request
from blockyard.router.parsing.formats import NO_FORMAT
from blockyard.router.request.sampling_checks import SamplingLimits
from blockyard.router.request.validation import valid_generation

from tests.unit.router.facts import FACTS

from .rig import CHAT, COMPLETIONS, HELLO, Gateway

SAMPLES: list[Any] = [
    *(None, True, False, -3, -1, 0, 1, 2, 25, 2**40, 0.5, -0.5, 1000.5, "", "x", "auto", "none"),
    *([], {}, ["a"], [1], [[1]], ["a"] * 2000, [1] * 2000, {"1": 1}, {"type": "text"}, {"choice": ["a"]}),
    *(
        [{"role": "user", "content": "x"}],
        [{"role": "user", "content": 1}],
        [{"role": "king", "content": "x"}],
    ),
    *([{"role": "user", "content": [{"type": "text", "text": "x"}]}], [{"role": "user"}]),
    {"include_usage": True},
    {"include_usage": 1},
    {"json": {}, "regex": None},
    {"nobody": 1},
]


def response_wanted(body: Body) -> Wanted:
    request = read_request(body)
    return request.wanted(
        request.items(Surroundings(response_id="resp_1")), NO_FORMAT, can_store=False, can_seal=False
    )


ROUTES: list[tuple[str, Callable[[Body], Wanted], dict[str, Any]]] = [
    (CHAT, chat_wanted, {"messages": HELLO}),
    (COMPLETIONS, completion_wanted, {"prompt": "x"}),
    (RESPONSES, response_wanted, {"input": "x"}),
    ("/v1/messages", messages_wanted, {"messages": HELLO, "max_tokens": 9}),
]
BESIDE = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}
"""Fields that a field needs beside it."""
NOT_SAID = {
    # An empty text is no name, schema, expression or prompt; a list of texts may hold one that is too long.
    *(("session_id", '""'), ("json_schema", '""'), ("json_schema", '"x"'), ("json_schema", '"auto"')),
    *(("guided_json", '""'), ("guided_json", '"x"'), ("guided_json", '"auto"'), ("json_schema", '"none"')),
    *(("guided_json", '"none"'), ("regex", '""'), ("guided_regex", '""'), ("prompt", '""'), ("prompt", "[]")),
    *(("stop", '""'), ("bad_words", '""'), ("chat_template_kwargs", '{"1": 1}'), ("model", '""')),
    # Ranges that the description tells.
    *(("top_p", "0"), ("priority", "1099511627776"), ("truncate_prompt_tokens", "0"), ("n", "25")),
    *(("truncate_prompt_tokens", "-3"), ("beam_width", "25"), ("prompt", "[1]"), ("best_of", "1")),
    # Another model's name, fields that depend on others, and what is too long for the context.
    *(("model", json.dumps(text)) for text in ("x", "auto", "none")),
    ("tool_choice", '"auto"'),
    *(("structured_outputs", "{}"), ("continue_final_message", "true"), ("min_tokens", "25")),
    *(("prompt", json.dumps([1] * 2000)), ("prompt", json.dumps(["a"] * 2000))),
}
"""Values on which the document and the checks differ: one allows them, and the other refuses them."""


def schema_of(path: str) -> dict[str, Any]:
    fields = PATHS[path].fields
    assert fields is not None
    return body_schema(fields, PATHS[path].required)


def is_taken(parse: Callable[[Body], Wanted], body: Body) -> bool:
    try:
        for request in parse(body).requests:
            valid_generation(request, FACTS, max_model_len=100, limits=SamplingLimits())
    except RouterError:
        return False
    return True


def cases() -> list[Any]:
    return [
        pytest.param(path, parse, base, name, id=f"{path}-{name}")
        for path, parse, base in ROUTES
        for name in PATHS[path].fields or ()
    ]


@pytest.mark.parametrize(("path", "parse", "base", "name"), cases())
def test_the_document_allows_what_the_checks_allow(
    path: str, parse: Callable[[Body], Wanted], base: dict[str, Any], name: str
) -> None:
    validator = jsonschema.Draft202012Validator(schema_of(path))
    for sample in SAMPLES:
        body = {**base, **BESIDE.get(name, {}), name: sample}
        if (name, json.dumps(sample)) not in NOT_SAID:
            assert validator.is_valid(body) is is_taken(parse, body), (name, sample)


@pytest.mark.parametrize("path", [path for path, described in PATHS.items() if described.fields])
def test_each_body_is_described_field_by_field(path: str) -> None:
    schema = schema_of(path)
    jsonschema.Draft202012Validator.check_schema(schema)
    untold = {name for name, told in schema["properties"].items() if "description" not in told}
    assert untold <= {"stream_options", "messages", "logprobs", "tokens"}
    assert not jsonschema.Draft202012Validator(schema).is_valid({"nobody_knows": 1})


def test_the_document_names_every_path_and_says_what_an_error_is() -> None:
    made = document("1.2.3")
    assert made["paths"].keys() == PATHS.keys()
    assert made["info"]["version"] == "1.2.3"
    schemas = made["components"]["schemas"]
    body = {"error": {"message": "x", "type": "y", "param": None, "code": "z"}}
    jsonschema.validate(body, schemas["Error"])
    jsonschema.validate(anthropic_error(InvalidRequest("x"), "r"), schemas["AnthropicError"])


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    tags = Tags()
    tags.feed(page("1<script>"))
    assert {tag for tag, _ in tags.seen} <= {*("html", "meta", "title", "style", "h1", "h2", "p", "code")} | {
        *("table", "tr", "th", "td")
    }
    assert not [attrs for _, attrs in tags.seen if attrs.keys() & {"src", "href", "style", "onload"}]
    for described in PATHS.values():
        for name in described.fields or ():
            assert f"<code>{name}</code>" in page("1")


@pytest.mark.asyncio(loop_scope="module")
async def test_both_are_served(gateway: Gateway) -> None:
    answer = await gateway.get("/openapi.json")
    assert answer.headers["content-type"].startswith("application/json")
    made = json.loads(answer.body)
    assert made == json.loads(json.dumps(document(made["info"]["version"])))
    for path, described in PATHS.items():
        wrong = await gateway.get(path, verb="PUT")
        assert (wrong.status, wrong.headers["allow"]) == (405, ", ".join(described.verbs))
    shown = await gateway.get("/docs")
    policy = shown.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert len(re.findall(rb"<style>", shown.body)) == 1
