"""Values of a JSON object by the type that a field must have. null is the same as leaving a field out.

Owns types alone: ranges are checked where gRPC's are (../sampling_checks.py, ../validation.py).
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from blockyard.router.errors import InvalidRequest
from blockyard.router.names import is_id

UINT32 = (0, 2**32 - 1)
INT32 = (-(2**31), 2**31 - 1)
INT64 = (-(2**63), 2**63 - 1)

Body = Mapping[str, Any]
Kind = Callable[[str, Any], Any]
"""Takes a field's name and its value; raises InvalidRequest."""


def given(body: Body, name: str, kind: Kind) -> Any:
    """None where it is absent."""
    value = body.get(name)
    return None if value is None else kind(name, value)


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest.of(name, "must be true or false")
    return value


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest.of(name, "must be a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidRequest.of(name, "must be a number that is not as large") from None


def integer(bounds: tuple[int, int]) -> Kind:
    lowest, highest = bounds

    def checked(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequest.of(name, "must be an integer")
        if not lowest <= value <= highest:
            raise InvalidRequest.of(name, f"must be an integer from {lowest} to {highest}")
        return value

    return checked


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest.of(name, "must be a string")
    # JSON may spell half of a surrogate pair, which is no character and has no UTF-8.
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest.of(name, "must be valid Unicode") from None
    return value


def json_text(name: str, value: Any) -> str:
    """The value as JSON."""
    try:
        return text(name, json.dumps(value, ensure_ascii=False))
    except RecursionError:
        raise InvalidRequest.of(name, "is nested too deeply") from None


def texts(name: str, value: Any) -> list[str]:
    """One or a list of them."""
    return [text(name, item) for item in (value if isinstance(value, list) else [value])]


def token_ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise InvalidRequest.of(name, "must be a list of token ids")
    # Three passes in C: a list may have hundreds of thousands.
    if set(map(type, value)) - {int} or (value and not UINT32[0] <= min(value) <= max(value) <= UINT32[1]):
        raise InvalidRequest.of(name, "must be a list of token ids")
    return value


def mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest.of(name, "must be an object")
    return value


def items(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequest.of(name, "must be a list")
    return value


def refuse_others(body: Body, known: Iterable[str], *, inside: str = "") -> None:
    """Raises InvalidRequest for a field that nothing here knows: it would else be dropped without a word."""
    others = body.keys() - known
    for name in sorted(others):
        # What is no name may be any text of the client's: not repeated.
        told = inside + name if is_id(name) else inside + "(a field)"
        raise InvalidRequest.of(told, "is not known here")
