"""OpenAPI document: the fields of each path, as OpenAPI for programs and as one page for people.

Made from the tables that check requests and from the comments of the contract. Nothing is described twice. Does not own
what a path does (routes.py).
"""

import html
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.resources import files
from string import Formatter
from typing import Any

from blockyard.proto.limits import RANGES
from blockyard.router.openai import tokens
from blockyard.router.openai.anthropic import request as messages_request
from blockyard.router.openai.batches import paths as batch_paths
from blockyard.router.openai.batches.fields import CREATE_FIELDS
from blockyard.router.openai.requests import chat as chat_request
from blockyard.router.openai.requests import completion as completion_request
from blockyard.router.openai.requests import embedding as embedding_request
from blockyard.router.openai.requests.fields import Fields, object_schema
from blockyard.router.openai.responses import request as responses_request
from blockyard.router.openai.responses.stored import PAGE_QUERY

MODELS = "/v1/models"
RESPONSES = "/v1/responses"
RESPONSE = f"{RESPONSES}/{{response_id}}"
INPUT_ITEMS = f"{RESPONSE}/input_items"
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{border-top:1px solid #bbb;padding:.3rem .6rem .3rem 0;"
    "text-align:left;vertical-align:top}code{font:14px ui-monospace,monospace}h2{margin-top:2.5rem}"
)
PAGE_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    f"style-src 'sha256-{b64encode(sha256(_STYLE.encode()).digest()).decode()}'",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """Description of one path of the API."""

    verb: str
    says: str
    fields: Fields | None = None
    """Fields of the request's body. None: it has no body."""
    required: tuple[str, ...] = ()
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Schemas of the parameters of its query."""
    answer: str = "application/json"
    """Media type of its answer."""
    error: str = "Error"
    """Schema of its errors."""
    form: Mapping[str, str] | None = None
    """Fields of a body that is a form, with their formats."""
    also: tuple["Described", ...] = ()
    """The other verbs of the path."""

    @property
    def verbs(self) -> tuple[str, ...]:
        return self.verb, *(other.verb for other in self.also)


PATHS: Mapping[str, Described] = {
    "/v1/chat/completions": Described(
        verb="POST", says="Answers a chat.", fields=chat_request.FIELDS, required=("messages",)
    ),
    "/v1/completions": Described(
        verb="POST", says="Continues prompts.", fields=completion_request.FIELDS, required=("prompt",)
    ),
    "/v1/embeddings": Described(
        verb="POST", says="Embeds texts.", fields=embedding_request.FIELDS, required=("input",)
    ),
    RESPONSES: Described(
        verb="POST", says="Answers as a response.", fields=responses_request.FIELDS, required=("input",)
    ),
    RESPONSE: Described(
        verb="GET",
        says="A stored response, by its id.",
        also=(Described(verb="DELETE", says="Deletes a stored response."),),
    ),
    INPUT_ITEMS: Described(
        verb="GET",
        says="The items before a stored response.",
        query=PAGE_QUERY,
    ),
    "/v1/messages": Described(
        verb="POST",
        says="Answers a chat, in the form of Anthropic's API.",
        fields=messages_request.FIELDS,
        required=("max_tokens", "messages"),
        error="AnthropicError",
    ),
    "/v1/messages/count_tokens": Described(
        verb="POST",
        says="The number of tokens of a prompt, in the form of Anthropic's API.",
        fields=messages_request.COUNT_FIELDS,
        required=("messages",),
        error="AnthropicError",
    ),
    MODELS: Described(verb="GET", says="The models that are served, and adapters."),
    f"{MODELS}/{{model}}": Described(verb="GET", says="One model or adapter, by its name."),
    batch_paths.FILES: Described(
        verb="GET",
        says="The tenant's files, newest first.",
        query={**batch_paths.PAGE_QUERY, "purpose": {"type": "string"}},
        also=(
            Described(
                verb="POST",
                says="Uploads a file of requests, one per line, with the purpose batch.",
                form={"purpose": "string", "file": "binary"},
            ),
        ),
    ),
    batch_paths.FILE: Described(
        verb="GET", says="One file, by its id.", also=(Described(verb="DELETE", says="Deletes the file."),)
    ),
    batch_paths.CONTENT: Described(verb="GET", says="The lines of a file.", answer="application/x-ndjson"),
    batch_paths.BATCHES: Described(
        verb="POST",
        says="Answers a file of requests with the lowest priority, within 24 hours.",
        fields=CREATE_FIELDS,
        required=("input_file_id", "endpoint", "completion_window"),
        also=(
            Described(verb="GET", says="The tenant's batches, newest first.", query=batch_paths.PAGE_QUERY),
        ),
    ),
    batch_paths.BATCH: Described(verb="GET", says="One batch, by its id."),
    batch_paths.CANCEL: Described(verb="POST", says="Ends a batch. Answers that exist stay."),
    "/tokenize": Described(
        verb="POST", says="The tokens of a prompt or a chat, as in vLLM.", fields=tokens.TOKENIZE_FIELDS
    ),
    "/detokenize": Described(
        verb="POST",
        says="The text of tokens, as in vLLM.",
        fields=tokens.DETOKENIZE_FIELDS,
        required=("tokens",),
    ),
    "/version": Described(verb="GET", says="The version of the router."),
    "/metrics": Described(verb="GET", says="The router's metrics.", answer="text/plain"),
    "/health": Described(verb="GET", says="200 if a worker is ready, else 503. Needs no token."),
    "/openapi.json": Described(verb="GET", says="This document as OpenAPI."),
    "/docs": Described(verb="GET", says="This document as a page.", answer="text/html"),
    "/": Described(
        verb="GET", says="A page for a chat with the model. Needs no token itself.", answer="text/html"
    ),
}
"""All paths of the API, in the order of the document."""


def document(version: str) -> dict[str, Any]:
    """Return the description of the API as an OpenAPI document."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Blockyard", "version": version},
        "security": [{"token": []}, {}],
        "paths": {
            path: {one.verb.lower(): _operation(path, one) for one in (described, *described.also)}
            for path, described in PATHS.items()
        },
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR},
        },
    }


def page(version: str) -> str:
    """Return the description of the API as HTML that loads nothing and runs nothing."""
    title = f"Blockyard {html.escape(version)}: HTTP API"
    sections = "".join(
        _section(path, one) for path, described in PATHS.items() for one in (described, *described.also)
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1><p>The same for programs: <code>/openapi.json</code>.</p>{sections}</html>"
    )


_STRING = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {**_STRING, "description": "The field that is wrong."},
                "code": _STRING,
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
        "request_id": {"type": "string"},
    },
    "required": ["type", "error", "request_id"],
}


def _operation(path: str, described: Described) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{described.error}"}}}
    operation: dict[str, Any] = {
        "summary": described.says,
        "responses": {
            "200": {"description": "OK", "content": {described.answer: {}}},
            "default": {"description": "What went wrong.", "content": error},
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for _, name, _, _ in Formatter().parse(path)
        if name
    ]
    parameters += [
        {"name": name, "in": "query", "schema": schema} for name, schema in described.query.items()
    ]
    if parameters:
        operation["parameters"] = parameters
    if described.form is not None:
        form = {name: {"type": "string", "format": kind} for name, kind in described.form.items()}
        schema = {"type": "object", "properties": form, "required": sorted(form)}
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    if described.fields is not None:
        schema = body_schema(described.fields, described.required)
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        if "stream" in described.fields:
            operation["responses"]["200"]["content"]["text/event-stream"] = {}
    return operation


def body_schema(fields: Fields, required: Iterable[str] = ()) -> dict[str, Any]:
    schema = object_schema(fields, required=required)
    comments = _comments()
    for name, property_ in schema["properties"].items():
        if name in RANGES and {"number", "integer"} & set(property_["type"]):
            property_["minimum"], property_["maximum"] = RANGES[name]
        if name in comments:
            property_.setdefault("description", comments[name])
    return schema


def _comments() -> dict[str, str]:
    """Return the comments of request fields in inference.proto, by the field's name."""
    found: dict[str, dict[str, str]] = {}
    message, comment = "", list[str]()
    for line in files("blockyard.proto.v1").joinpath("inference.proto").read_text().splitlines():
        match line.split():
            case ["//", *words]:
                comment += words
                continue
            case ["message", name, *_]:
                message = name
            case [*_, field, "=", _]:
                found.setdefault(message, {})[field] = " ".join(comment)
        comment = []
    return {**found["GenerateRequest"], **found["SamplingParams"], **found["Chat"]}


def _section(path: str, described: Described) -> str:
    asked = f" Query: {', '.join(described.query)}." if described.query else ""
    says = html.escape(described.says + asked)
    head = f"<h2><code>{described.verb} {html.escape(path)}</code></h2><p>{says}</p>"
    if described.fields is None:
        return head
    rows = "".join(_rows(described.fields, described.required))
    return f"{head}<table><tr><th>field<th>type<th></tr>{rows}</table>"


def _rows(fields: Fields, required: Iterable[str]) -> Iterator[str]:
    for name, schema in body_schema(fields, required)["properties"].items():
        must = " (required)" if name in required else ""
        text = f"{schema.get('description', '')}{must}"
        yield f"<tr><td><code>{name}</code><td>{_type(schema)}<td>{html.escape(text)}</tr>"


def _type(schema: Mapping[str, Any]) -> str:
    kinds = schema.get("type", "")
    named = [kinds] if isinstance(kinds, str) else [kind for kind in kinds if kind != "null"]
    return html.escape(" or ".join(named))
