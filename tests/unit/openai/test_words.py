"""Errors of each protocol use that protocol's words, whatever the reason. The tests read all texts from the source."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import blockyard.router as package
import pytest
from blockyard.proto.v1 import cluster_pb2, inference_pb2
from blockyard.router import errors
from blockyard.router.errors import ContextLengthExceeded, FieldViolation, InvalidRequest, RouterError
from blockyard.router.openai.http.errors import HttpRefusal, error_body, json_name
from blockyard.router.openai.requests import chat as chat_request
from blockyard.router.openai.requests import completion as completion_request
from blockyard.router.openai.requests.fields import Fields

ROUTER = Path(package.__path__[0])
ONLY_GRPC = {
    *("services", "server.py"),
    # Ahead of a worker, and of the command line.
    *("link.py", "client"),
}
MESSAGES_OF_GRPC = {
    name
    for file in (inference_pb2, cluster_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    for name in (method.name, method.input_type.name, method.output_type.name)
} - {"Abort", "Generate"}
WORDS_OF_GRPC = re.compile(
    rf"\b(?:gRPC|protobuf|RPC|method|metadata|{'|'.join(sorted(MESSAGES_OF_GRPC))}|[A-Z]+_[A-Z_]+)\b"
)
WORDS_OF_HTTP = re.compile(
    r"\b(?:HTTPS?|headers?|body|bodies|paths?|routes?|OpenAI|openapi|status [1-5]\d\d)\b|/v1"
)
NAMES_NOBODY_SENDS = {"lora_name", "policy", "sampling.early_stopping"}
"""Fields of the contract that no body of HTTP can set."""
ROUTES: list[tuple[Mapping[str, str], Fields, set[str]]] = [
    (chat_request.NAMES, chat_request.FIELDS, {"prompt", "prompt_token_ids", "sampling.prompt_logprobs"}),
    (completion_request.NAMES, completion_request.FIELDS, {"chat"}),
]


def reasons(kind: type[RouterError] = RouterError) -> Iterator[type[RouterError]]:
    for child in kind.__subclasses__():
        yield child
        yield from reasons(child)


KINDS = {kind.__name__: kind for kind in reasons()}


def test_every_field_of_the_contract_has_the_name_that_a_body_has_for_it() -> None:
    generate, sampling, chat = (
        message.DESCRIPTOR.fields_by_name
        for message in (inference_pb2.GenerateRequest, inference_pb2.SamplingParams, inference_pb2.Chat)
    )
    paths = {
        "input",
        *generate,
        *(f"sampling.{name}" for name in sampling),
        *(f"chat.{name}" for name in chat),
    }
    for names, fields, others in ROUTES:
        for path in paths - NAMES_NOBODY_SENDS - {"sampling", "chat", "return_prompt_token_ids"}:
            if path in others or path.partition(".")[0] in others:
                continue
            shown = error_body(InvalidRequest.of(path, "is wrong"), names)["error"]
            assert shown["param"] in {*fields, "X-Request-Id"}, path
            assert shown["message"] == f"{shown['param']}: is wrong"


def test_what_a_message_says_of_other_fields_is_renamed_as_well() -> None:
    error = InvalidRequest.of("sampling.min_tokens", "must be at most max_tokens")
    for names, told in ((chat_request.NAMES, "max_completion_tokens"), ({}, "max_tokens")):
        assert error_body(error, names)["error"]["message"] == f"min_tokens: must be at most {told}"


def test_every_reason_is_told_in_words_of_both_protocols_or_of_its_own() -> None:
    seen = set[str]()
    for file in ROUTER.rglob("*.py"):
        place = file.relative_to(ROUTER)
        for name, text in told(ast.parse(file.read_text())):
            seen.add(name)
            if not {place.name, place.parts[0]} & ONLY_GRPC:
                assert not WORDS_OF_GRPC.search(text), (place, text)
            if place.parts[0] != "openai":
                assert not WORDS_OF_HTTP.search(text), (place, text)
    groups = {errors.NotFound, errors.Unavailable, HttpRefusal}
    assert {kind.__name__ for kind in set(KINDS.values()) - groups} <= seen, "each reason was looked at"


def test_a_message_begins_with_a_field_only_where_the_error_names_it() -> None:
    """The gateway finds the field by this name alone, and writes it in the client's own words."""
    for file in ROUTER.rglob("*.py"):
        for name, text in told(ast.parse(file.read_text())):
            begins = re.match(r"([a-z_.]+): ", text)
            if begins and name in KINDS:
                # "input" is a oneof, which no client sends by that name.
                assert issubclass(KINDS[name], ContextLengthExceeded), (file.name, text)


def told(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The kind and the literal text of each error, and of each problem of a field, that a module makes."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name), args=[text, *_]) if name in KINDS:
                yield name, literal(text)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="of"), args=[_, text]) if (
                name in KINDS
            ):
                yield name, literal(text)
            case ast.Call(func=ast.Name(id=FieldViolation.__name__), keywords=keywords):
                yield from (("a field", literal(one.value)) for one in keywords if one.arg == "description")
            case ast.Yield(value=ast.Tuple(elts=[_, text])):
                yield "a field", literal(text)
            case ast.FunctionDef(name=name) if name.endswith("_problem"):
                returned = (
                    inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return) and inner.value
                )
                yield from (("a field", literal(value)) for value in returned)


def literal(node: ast.AST) -> str:
    """The text that stands in the source; of a choice, both."""
    return "".join(
        inner.value
        for inner in ast.walk(node)
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if hasattr(kind, "reason")])
def test_every_reason_keeps_its_sentence_over_http(kind: type[RouterError]) -> None:
    shown = error_body(kind.of("sampling.max_tokens", "is wrong"), chat_request.NAMES)["error"]
    assert shown["message"] == "max_completion_tokens: is wrong"
    assert (shown["param"], shown["code"]) == ("max_completion_tokens", kind.reason.lower())


def test_a_name_that_is_no_field_of_the_contract_is_kept() -> None:
    assert json_name("messages[0].content") == "messages[0].content"
