"""What OpenAI's API knows and this gateway does not do: refused by name, unless what is said asks for nothing.

A field that was dropped without a word would answer another question than the client's.
"""

from typing import Any

from blockyard.router.errors import FieldViolation, Unsupported
from blockyard.router.openai.fields import Body

HARMLESS: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    **dict.fromkeys(("audio", "best_of", "prediction", "prompt_cache_key", "prompt_cache_retention"), ()),
    **dict.fromkeys(("verbosity", "web_search_options"), ()),
}
"""Values that ask for nothing, by field; null always does."""


def refuse_unsupported(body: Body) -> None:
    """Raises Unsupported for the first field."""
    for name, harmless in HARMLESS.items():
        value = body.get(name)
        if value is None or value in harmless:
            continue
        if name == "best_of" and value == (body.get("n") or 1):
            continue
        raise unsupported(name)


def unsupported(name: str) -> Unsupported:
    violation = FieldViolation(field=name, description="is not supported")
    return Unsupported(f"{name}: is not supported", violations=(violation,))
