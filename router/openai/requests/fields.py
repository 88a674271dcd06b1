"""Fields of a JSON object, checked by type. null is the same as an absent field.

A kind of field has a check and a JSON schema for the API's document (openai/openapi.py), so each is described once.
Owns types, and the refusal of unknown fields. Ranges are checked as for gRPC (request/sampling_checks.py,
request/validation.py).
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from blockyard.proto.naming.identifiers import is_id
from blockyard.router.errors import InvalidRequest

UINT32 = (0, 2**32 - 1)
INT32 = (-(2**31), 2**31 - 1)
INT64 = (-(2**63), 2**63 - 1)

Body = Mapping[str, Any]
Value = TypeVar("Value", covariant=True)
Other = TypeVar("Other")


@dataclass(frozen=True, slots=True)
class Kind(Generic[Value]):
    check: Callable[[str, Any], Value]
    """Takes a field's name and value, and returns the checked value. Raises InvalidRequest."""
    schema: Mapping[str, Any]

    def __call__(self, name: str, value: Any) -> Value:
        return self.check(name, value)

    def then(self, check: Callable[[str, Value], Other], **schema: Any) -> "Kind[Other]":
        """Return a kind that checks further what this one accepts. `schema` adds to its JSON schema."""
        return Kind(lambda name, value: check(name, self.check(name, value)), {**self.schema, **schema})

    def said(self, description: str) -> "Kind[Value]":
        return Kind(self.check, {**self.schema, "description": description})


Fields = Mapping[str, Kind[Any]]
"""Fields of a body, by name."""


def given(body: Body, name: str, kind: Kind[Value]) -> Value | None:
    """Return a field's checked value, or None if it is absent or null. Raises InvalidRequest."""
    value = body.get(name)
    return None if value is None else kind(name, value)


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest.of(name, "must be true or false")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest.of(name, "must be a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidRequest.of(name, "must be a smaller number") from None


def integer(bounds: tuple[int, int]) -> Kind[int]:
    lowest, highest = bounds

    def checked(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequest.of(name, "must be an integer")
        if not lowest <= value <= highest:
            raise InvalidRequest.of(name, f"must be an integer from {lowest} to {highest}")
        return value

    return Kind(checked, {"type": "integer", "minimum": lowest, "maximum": highest})


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest.of(name, "is required: a string" if value is None else "must be a string")
    # JSON can spell a lone surrogate, which is not a character and has no UTF-8.
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest.of(name, "must be valid Unicode") from None
    return value


def json_text(name: str, value: Any) -> str:
    """Return the value as JSON text. Raises InvalidRequest."""
    try:
        return text(name, json.dumps(value, ensure_ascii=False))
    except RecursionError:
        raise InvalidRequest.of(name, "is nested too deeply") from None


def _texts(name: str, value: Any) -> list[str]:
    return [text(name, item) for item in (value if isinstance(value, list) else [value])]


def _token_ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise InvalidRequest.of(name, "must be a list of token ids")
    # Three passes in C: a list may have hundreds of thousands of elements.
    if set(map(type, value)) - {int} or (value and not UINT32[0] <= min(value) <= max(value) <= UINT32[1]):
        raise InvalidRequest.of(name, "must be a list of token ids")
    return value


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest.of(name, "must be an object")
    return value


def _items(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequest.of(name, "must be a list")
    return value


boolean = Kind(_boolean, {"type": "boolean"})
number = Kind(_number, {"type": "number"})
text = Kind(_text, {"type": "string"})
texts = Kind(_texts, {"type": ["string", "array"], "items": text.schema})
"""One text, or a list of them."""
token_ids = Kind(_token_ids, {"type": "array", "items": integer(UINT32).schema})
mapping = Kind(_mapping, {"type": "object"})
items = Kind(_items, {"type": "array"})


def refuse_others(
    body: Body, known: Iterable[str], *, inside: str = "", says: str = "is not known here"
) -> None:
    """Raise InvalidRequest for an unknown field, which would otherwise be dropped silently."""
    others = body.keys() - known
    for name in sorted(others):
        # Anything but a valid name may be any text of the client, so it is not repeated.
        shown = inside + name if is_id(name) else inside + "(a field)"
        raise InvalidRequest.of(shown, says)


def object_schema(fields: Fields, *, required: Iterable[str] = ()) -> dict[str, Any]:
    """Return the schema of an object with these fields and no others."""
    properties = {name: _or_null(kind.schema, required=name in required) for name, kind in fields.items()}
    closed = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**closed, "required": sorted(required)} if required else closed


def _or_null(schema: Mapping[str, Any], *, required: bool) -> dict[str, Any]:
    """Return the schema of a field, which allows null unless the field is required."""
    if required:
        return dict(schema)
    kinds = schema.get("type")
    match kinds:
        case str():
            return {**schema, "type": [kinds, "null"]}
        case list():
            return {**schema, "type": [*kinds, "null"]}
        case _:
            return dict(schema)
