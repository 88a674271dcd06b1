"""What an output must follow, in OpenAI's words, vLLM's and ours, as one StructuredOutput.

Owns the names and shapes of fields. Does not own whether a schema or an expression can be followed
(../structured_output.py, the worker).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import InvalidRequest
from blockyard.router.openai.fields import Body, boolean, items, json_text, mapping, refuse_others, text
from blockyard.router.openai.unsupported import unsupported
from blockyard.router.structured_output import MAX_REGEX_BYTES

StructuredOutput = inference_pb2.StructuredOutput
MAX_CHOICES = 1024
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")
"""Characters that mean something else in an expression."""


def given_structure(body: Body) -> StructuredOutput | None:
    """Raises InvalidRequest, also for more than one; Unsupported."""
    found = {
        name: message
        for name, read in STRUCTURES.items()
        if body.get(name) is not None and (message := read(name, body[name])) is not None
    }
    if len(found) > 1:
        first, second = sorted(found)[:2]
        raise InvalidRequest.of(second, f"excludes {first}")
    return next(iter(found.values()), None)


def _response_format(name: str, value: Any) -> StructuredOutput | None:
    given = mapping(name, value)
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutput(json_object=True)
        case "json_schema":
            # Its `name`, `description` and `strict` change nothing: an output always follows the schema.
            inner = mapping(f"{name}.json_schema", given.get("json_schema"))
            return _json_schema(f"{name}.json_schema.schema", inner.get("schema"))
        case _:
            raise InvalidRequest.of(f"{name}.type", "must be text, json_object or json_schema")


def _json_schema(name: str, value: Any) -> StructuredOutput:
    """A string is taken for JSON already."""
    if isinstance(value, str):
        return StructuredOutput(json_schema=text(name, value))
    if not isinstance(value, dict | bool):
        raise InvalidRequest.of(name, "must be a JSON schema")
    return StructuredOutput(json_schema=json_text(name, value))


def _regex(name: str, value: Any) -> StructuredOutput:
    return StructuredOutput(regex=text(name, value))


def _choice(name: str, value: Any) -> StructuredOutput:
    """One of some texts, exactly."""
    choices = items(name, value)
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest.of(name, f"must have 1 to {MAX_CHOICES} choices")
    if not all(text(name, choice) for choice in choices):
        raise InvalidRequest.of(name, "must be a list of texts that are not empty")
    regex = "|".join(_META.sub(r"\\\g<0>", choice) for choice in choices)
    if len(regex.encode()) > MAX_REGEX_BYTES:
        raise InvalidRequest.of(name, f"must have at most {MAX_REGEX_BYTES} bytes in all")
    return StructuredOutput(regex=regex)


def _json_object(name: str, value: Any) -> StructuredOutput | None:
    return StructuredOutput(json_object=True) if boolean(name, value) else None


def _structured_outputs(name: str, value: Any) -> StructuredOutput | None:
    """vLLM's: one of its fields, and options of back ends that are not here."""
    given = {key: item for key, item in mapping(name, value).items() if item is not None}
    for key in ("grammar", "structural_tag", "whitespace_pattern"):
        if key in given:
            raise unsupported(f"{name}.{key}")
    for key in ("disable_any_whitespace", "disable_additional_properties"):
        if given.get(key):
            raise unsupported(f"{name}.{key}")
    refuse_others(given, (*_OF_VLLM, *_OPTIONS_OF_VLLM), inside=f"{name}.")
    found = [read(f"{name}.{key}", given[key]) for key, read in _OF_VLLM.items() if key in given]
    if len(found) != 1:
        raise InvalidRequest.of(name, f"must have one of {', '.join(_OF_VLLM)}")
    return found[0]


Reader = Callable[[str, Any], StructuredOutput | None]
_OF_VLLM: Mapping[str, Reader] = {
    "json": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "json_object": _json_object,
}
_OPTIONS_OF_VLLM = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
STRUCTURES: Mapping[str, Reader] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "json_schema": _json_schema,
    "regex": _regex,
    "guided_json": _json_schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
}
