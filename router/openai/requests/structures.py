"""Structured output fields: reads those of OpenAI, of vLLM and our own as one StructuredOutput.

Owns the names and shapes of fields. Does not own whether a schema or an expression can be used
(request/structured_output.py, the worker).
"""

from typing import Any

from blockyard.proto.limits import MAX_REGEX_BYTES
from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import InvalidRequest
from blockyard.router.openai.requests.fields import (
    Body,
    Fields,
    Kind,
    boolean,
    given,
    items,
    json_text,
    mapping,
    object_schema,
    refuse_others,
    text,
)
from blockyard.router.openai.requests.unsupported import unsupported

StructuredOutput = inference_pb2.StructuredOutput
MAX_CHOICES = 1024
_ESCAPED = str.maketrans({character: f"\\{character}" for character in r"\.+*?()|[]{}^$#&~/-"})
"""Characters with a special meaning in a regular expression."""


def given_structure(body: Body) -> StructuredOutput | None:
    """Return the structured output that the body asks for, or None. Raises Unsupported, or InvalidRequest, also for
    more than one."""
    found = {
        name: message for name, kind in STRUCTURES.items() if (message := given(body, name, kind)) is not None
    }
    if len(found) > 1:
        first, second = sorted(found)[:2]
        raise InvalidRequest.of(second, f"excludes {first}")
    return next(iter(found.values()), None)


def _read_response_format(name: str, asked: Body) -> StructuredOutput | None:
    match asked.get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutput(json_object=True)
        case "json_schema":
            # Its `name`, `description` and `strict` have no effect: an output always follows the schema.
            inner = mapping(f"{name}.json_schema", asked.get("json_schema"))
            return _read_schema(f"{name}.json_schema.schema", inner.get("schema"))
        case _:
            raise InvalidRequest.of(f"{name}.type", "must be text, json_object or json_schema")


def _read_schema(name: str, value: Any) -> StructuredOutput:
    """Return a JSON schema as a StructuredOutput. A string is taken as JSON text."""
    if isinstance(value, str):
        return StructuredOutput(json_schema=text(name, value))
    if not isinstance(value, dict | bool):
        raise InvalidRequest.of(name, "must be a JSON schema")
    return StructuredOutput(json_schema=json_text(name, value))


def _read_regex(name: str, value: str) -> StructuredOutput:
    return StructuredOutput(regex=value)


def _read_choice(name: str, value: Any) -> StructuredOutput:
    """Return a list of texts, of which the output must be one, as a regular expression."""
    choices = items(name, value)
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest.of(name, f"must have 1 to {MAX_CHOICES} choices")
    if not all(text(name, choice) for choice in choices):
        raise InvalidRequest.of(name, "must be a list of texts that are not empty")
    regex = "|".join(choice.translate(_ESCAPED) for choice in choices)
    if len(regex.encode()) > MAX_REGEX_BYTES:
        raise InvalidRequest.of(name, f"must have at most {MAX_REGEX_BYTES} bytes in all")
    return StructuredOutput(regex=regex)


def _read_json_object(name: str, value: bool) -> StructuredOutput | None:
    return StructuredOutput(json_object=True) if value else None


def _read_structured_outputs(name: str, value: Body) -> StructuredOutput | None:
    """Return the structure in vLLM's `structured_outputs`. Ignore options that ask for nothing, and refuse others."""
    asked = {key: item for key, item in value.items() if item is not None}
    for key in ("grammar", "structural_tag", "whitespace_pattern"):
        if key in asked:
            raise unsupported(f"{name}.{key}")
    for key in ("disable_any_whitespace", "disable_additional_properties"):
        if asked.get(key):
            raise unsupported(f"{name}.{key}")
    refuse_others(asked, (*_OF_VLLM, *_OPTIONS_OF_VLLM), inside=f"{name}.")
    found = asked.keys() & _OF_VLLM.keys()
    if len(found) != 1:
        raise InvalidRequest.of(name, f"must have one of {', '.join(_OF_VLLM)}")
    (key,) = found
    structure: StructuredOutput | None = _OF_VLLM[key](f"{name}.{key}", asked[key])
    return structure


_SCHEMA = {"type": ["object", "boolean", "string"]}
_CHOICES = {
    "type": "array",
    "items": {"type": "string", "minLength": 1},
    "minItems": 1,
    "maxItems": MAX_CHOICES,
}
_json_schema = Kind(_read_schema, _SCHEMA).said(
    "A JSON schema that the output follows, as a value or as JSON text."
)
_regex = text.then(_read_regex, minLength=1).said("A regular expression that the whole output matches.")
_choice = Kind(_read_choice, _CHOICES).said("The output is one of these texts.")
_OF_VLLM: Fields = {
    "json": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "json_object": boolean.then(_read_json_object).said("Any JSON object."),
}
_OPTIONS_OF_VLLM = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
STRUCTURES: Fields = {
    "response_format": mapping.then(
        _read_response_format,
        properties={
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": {"type": "object", "properties": {"schema": _SCHEMA}, "required": ["schema"]},
        },
        required=["type"],
    ).said("OpenAI's."),
    "structured_outputs": mapping.then(
        _read_structured_outputs,
        **object_schema({**_OF_VLLM, **dict.fromkeys(_OPTIONS_OF_VLLM, boolean)}),
        minProperties=1,
    ).said("vLLM's: one of json, regex, choice and json_object."),
    "json_schema": _json_schema,
    "regex": _regex,
    "guided_json": _json_schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
}
"""Fields that ask for a structured output. A body may have at most one of them."""
