"""Unsupported fields: refuses what OpenAI's API has and this gateway does not do.

A hint that changes no token is ignored, and a header of the answer names it. Any other known field is refused by name,
unless its value asks for nothing. To ignore it silently would answer another question than the client's. fields.py
refuses unknown fields.
"""

from collections.abc import Collection
from typing import Any

from blockyard.router.errors import Unsupported
from blockyard.router.openai.requests.fields import Body, Fields, Kind, boolean, mapping, text

HINTS: Fields = {
    **dict.fromkeys(("user", "safety_identifier"), text),
    **dict.fromkeys(("service_tier", "verbosity", "prompt_cache_key", "prompt_cache_retention"), text),
    "guided_decoding_backend": text,
    "store": boolean,
    **dict.fromkeys(("metadata", "prediction"), mapping),
}
"""Hints, whose types are checked. The API token names the caller, and `session_id` and `cache_salt` steer the cache."""
REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_grammar": (),
    "guided_whitespace_pattern": (),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "web_search_options": (),
}
"""Refused fields, each with the values that ask for nothing and so are allowed. null always is."""
UNSUPPORTED: Fields = {
    **{name: kind.said("Ignored: it changes no token.") for name, kind in HINTS.items()},
    **{
        name: Kind(lambda name, value: value, {"enum": [*harmless, None]}).said("Not supported.")
        for name, harmless in REFUSED.items()
    },
}
"""Hints and refused fields, for the API's document and the check for unknown fields."""


def refuse_unsupported(body: Body, *, but: Collection[str] = ()) -> None:
    """Raise Unsupported for the first field of REFUSED with a value that is not allowed. Skip `but`, which the route
    supports."""
    for name, harmless in REFUSED.items():
        if name in but:
            continue
        value = body.get(name)
        # By type too: in Python 0 equals False and 1 equals True.
        if value is None or any(type(value) is type(other) and value == other for other in harmless):
            continue
        if name == "best_of" and type(value) is int and value == (body.get("n") or 1):
            continue
        raise unsupported(name)


def ignored_hints(body: Body) -> tuple[str, ...]:
    """Return the names of the hints in a body. Raises InvalidRequest for a hint of the wrong type."""
    hints = tuple(name for name in sorted(HINTS) if body.get(name) is not None)
    for name in hints:
        HINTS[name](name, body[name])
    return hints


def unsupported(name: str) -> Unsupported:
    return Unsupported.of(name, "is not supported")
