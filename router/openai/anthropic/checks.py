"""Checks of objects in Anthropic's requests. Errors name paths as its API does: `messages.0.content.1.text`."""

from collections.abc import Iterable
from typing import Any, TypeVar

from blockyard.router.errors import InvalidRequest
from blockyard.router.openai.requests.fields import Body, Kind, mapping, refuse_others

Value = TypeVar("Value")


def closed(path: str, value: Any, known: Iterable[str]) -> Body:
    """Return an object whose fields are all known. Raises InvalidRequest."""
    body = mapping(path, value)
    refuse_extra({name: value for name, value in body.items() if value is not None}, known, inside=f"{path}.")
    return body


def refuse_extra(body: Body, known: Iterable[str], *, inside: str = "") -> None:
    """Raise InvalidRequest for an unknown field."""
    refuse_others(body, known, inside=inside, says="Extra inputs are not permitted")


def required(body: Body, name: str, kind: Kind[Value], *, inside: str = "") -> Value:
    """Return a field's checked value. Raises InvalidRequest if it is absent or null, too."""
    value = body.get(name)
    if value is None:
        raise InvalidRequest.of(inside + name, "Field required")
    return kind(inside + name, value)
