"""Responses requests: the body of /v1/responses, checked and translated to a chat, which is checked as one.

Owns names and shapes. Does not own the input's items (items.py) or earlier responses (stored.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blockyard.proto.limits import MAX_TOOLS
from blockyard.router.errors import InvalidRequest, Unsupported
from blockyard.router.openai.http.errors import json_name
from blockyard.router.openai.requests.chat import CHAT_FIELDS, EFFORTS, chat_wanted
from blockyard.router.openai.requests.fields import (
    Body,
    Fields,
    Kind,
    boolean,
    given,
    integer,
    items,
    mapping,
    object_schema,
    refuse_others,
    text,
)
from blockyard.router.openai.requests.sampling import OUTPUT_TOKENS, POSITIVE, SHARED
from blockyard.router.openai.requests.structures import STRUCTURES
from blockyard.router.openai.requests.tools import TOOL_FIELDS, function_name
from blockyard.router.openai.requests.unsupported import unsupported
from blockyard.router.openai.requests.wanted import Wanted
from blockyard.router.openai.responses.items import ITEM_SCHEMA, Item, Surroundings, chat_messages, read_input
from blockyard.router.parsing.formats import AnswerFormat

MAX_METADATA = 16
MAX_KEY_CHARS = 64
MAX_VALUE_CHARS = 512
ENCRYPTED = "reasoning.encrypted_content"
INCLUDABLE = (
    ENCRYPTED,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""Values of `include`. All but ENCRYPTED have no effect: they are of hosted tools and images, which are not here."""
SUMMARIES = ("auto", "concise", "detailed")
NAMES: Mapping[str, str] = {
    "input": "input",
    "chat.messages": "input",
    "sampling.max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Names of this API for fields of GenerateRequest and of a chat."""
_NOT_SHARED = ("n", "max_tokens", "return_token_ids", "response_format")
"""A response has one output, and names of its own for the others."""
_ELSEWHERE = {
    "messages": "is called input here",
    "max_tokens": "is called max_output_tokens here",
    "max_completion_tokens": "is called max_output_tokens here",
    "response_format": "is called text.format here",
    "n": "is not known here: a response has one output",
}
"""Answers to fields that clients know from chats."""
_TOOL_KEYS = ("type", "name", "description", "parameters", "strict")
_IGNORED = "Ignored: it changes no token."
_HINTS: Fields = {
    **dict.fromkeys(("user", "safety_identifier", "service_tier"), text.said(_IGNORED)),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention"), text.said(_IGNORED)),
    "prompt_cache_options": mapping.said(_IGNORED),
    "max_tool_calls": integer(POSITIVE).said("Ignored: it bounds hosted tools alone."),
}
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("background_options", "conversation", "image", "moderation", "prompt", "access_programs"), ()
    ),
    "background": (False,),
    "context_management": ([],),
    "top_logprobs": (0,),
}
"""Refused fields, each with the values that ask for nothing and so are allowed. null always is."""
_SUMMARY = ("summary", "generate_summary")
"""Names of one field, the later its older one."""
_IGNORED_OF_REASONING = ("context", "mode")


def _read_include(name: str, value: list[Any]) -> list[Any]:
    for number, one in enumerate(value):
        if one == "message.output_text.logprobs":
            raise unsupported(f"{name}[{number}]")
        if one not in INCLUDABLE:
            raise InvalidRequest.of(f"{name}[{number}]", f"must be one of {', '.join(INCLUDABLE)}")
    return value


def _read_metadata(name: str, value: dict[str, Any]) -> dict[str, Any]:
    if len(value) > MAX_METADATA:
        raise InvalidRequest.of(name, f"at most {MAX_METADATA} are allowed")
    for key, one in value.items():
        if len(text(name, key)) > MAX_KEY_CHARS or len(text(name, one)) > MAX_VALUE_CHARS:
            raise InvalidRequest.of(
                name, f"keys have at most {MAX_KEY_CHARS} characters, values {MAX_VALUE_CHARS}"
            )
    return value


def _read_truncation(name: str, value: str) -> str:
    if value == "auto":
        raise Unsupported.of(name, "auto is not supported: no input is dropped")
    if value != "disabled":
        raise InvalidRequest.of(name, "must be disabled")
    return value


def _any(name: str, value: Any) -> Any:
    return value


_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "name": text.schema,
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["type", "name"],
}
_FORMAT = {
    "type": ["object", "null"],
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "name": text.schema,
        "schema": {"type": "object"},
    },
    "required": ["type"],
}
_TEXT = {"format": _FORMAT, "verbosity": {"type": ["string", "null"]}}
_REASONING = {
    "effort": {"enum": [*EFFORTS, None]},
    **{name: {"enum": [*SUMMARIES, None]} for name in _SUMMARY},
    **{name: {} for name in _IGNORED_OF_REASONING},
}
FIELDS: Fields = {
    "input": Kind(_any, {"type": ["string", "array"], "items": ITEM_SCHEMA, "minItems": 1}).said(
        "A text, or items: messages, calls of functions, their outputs, reasoning, and references to stored items."
    ),
    "instructions": text.said("A system message before all items. It is not kept for the next response."),
    "previous_response_id": text.said("A stored response, whose items come before the input."),
    "store": boolean.said(
        "Whether the response is kept for a later one. Default true, where there is Redis."
    ),
    "max_output_tokens": integer(OUTPUT_TOKENS).said("Tokens to generate at most, reasoning included."),
    "tools": items.then(_any, items=_TOOL, maxItems=MAX_TOOLS).said(
        "Functions that the model may call. With `strict`, their arguments always follow their schema. Default false."
    ),
    "tool_choice": TOOL_FIELDS["tool_choice"].said(
        "none, auto, required, a function that must be called ({type: function, name}), or allowed_tools. Default auto."
    ),
    "parallel_tool_calls": TOOL_FIELDS["parallel_tool_calls"],
    "text": mapping.then(_any, properties=_TEXT, additionalProperties=False).said(
        "`format`: text, json_object or json_schema. `verbosity` is ignored."
    ),
    "reasoning": mapping.then(_any, properties=_REASONING, additionalProperties=False).said(
        "`effort`, where the chat template takes it. `summary` (auto, concise, detailed): the reasoning is also told "
        "as a summary, in full. The others are ignored."
    ),
    "stream": boolean.said("Whether the answer comes as server-sent events. Default false."),
    "stream_options": mapping.then(_any, **object_schema({"include_obfuscation": boolean})).said(_IGNORED),
    "metadata": mapping.then(
        _read_metadata,
        maxProperties=MAX_METADATA,
        propertyNames={"maxLength": MAX_KEY_CHARS},
        additionalProperties={"type": "string", "maxLength": MAX_VALUE_CHARS},
    ).said("Returned with the response."),
    "truncation": text.then(_read_truncation, enum=["disabled", None]).said("Nothing is dropped."),
    "include": items.then(_read_include, items={"enum": [*INCLUDABLE]}).said(
        f"`{ENCRYPTED}`: reasoning comes encrypted too, for clients that keep it. The others have no effect here."
    ),
    "chat_template_kwargs": CHAT_FIELDS["chat_template_kwargs"],
    **{name: kind for name, kind in SHARED.items() if name not in _NOT_SHARED},
    **_HINTS,
    **{
        name: Kind(_any, {"enum": [*harmless, None]}).said("Not supported.")
        for name, harmless in _REFUSED.items()
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest:
    """A body of /v1/responses whose own fields are checked."""

    body: Body
    previous_id: str | None
    asks_to_store: bool | None
    """None: the client leaves it to the default."""

    @property
    def asks_for_summary(self) -> bool:
        return _summary(self.body) is not None

    @property
    def asks_for_encrypted(self) -> bool:
        return ENCRYPTED in (self.body.get("include") or ())

    def items(self, around: Surroundings) -> list[Item]:
        """Return the items of the input. Raises InvalidRequest, Unsupported, NoSuchItem or BadEncryptedContent."""
        asked = self.body.get("input")
        if not isinstance(asked, str | list) or asked == []:
            raise InvalidRequest.of("input", "must be a text or a list with at least one item")
        return read_input("input", asked, around)

    def wanted(
        self, context: Sequence[Item], answers: AnswerFormat, *, can_store: bool, can_seal: bool
    ) -> Wanted:
        """Return the request as a checked call, with all the items before its output.

        Raises InvalidRequest or Unsupported, with names of this API.
        """
        body = self.body
        ignored = [name for name in _HINTS if body.get(name) is not None]
        effective = [ENCRYPTED] if can_seal else []
        ignored += ["include"] if any(one not in effective for one in body.get("include") or ()) else []
        ignored += ["store"] if self.asks_to_store and not can_store else []
        ignored += ["stream_options"] if body.get("stream_options") else []
        chat: dict[str, Any] = {name: body[name] for name in (*_SAME, "stream") if name in body}
        chat["max_completion_tokens"] = body.get("max_output_tokens")
        chat |= _format(body, ignored) | _effort(body, ignored) | _tools(body)
        instructions = given(body, "instructions", text)
        system = [] if instructions is None else [{"role": "system", "content": instructions}]
        chat["messages"] = system + chat_messages(context)
        try:
            wanted = chat_wanted(chat, answers)
        except (InvalidRequest, Unsupported) as error:
            raise _renamed(error) from None
        names = {**wanted.names, **NAMES}
        if names.get("sampling.structured_output") == "response_format":
            names["sampling.structured_output"] = "text.format"
        answering = replace(wanted.answering, ignored=tuple(sorted(ignored)))
        return replace(wanted, names=names, answering=answering)

    def echo(self) -> dict[str, Any]:
        """Return the fields of the request that the response repeats, with OpenAI's defaults."""
        body = self.body
        reasoning = body.get("reasoning") or {}
        return {
            "background": False,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "max_tool_calls": body.get("max_tool_calls"),
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": self.previous_id,
            "prompt_cache_key": body.get("prompt_cache_key"),
            "reasoning": {"effort": reasoning.get("effort"), "summary": _summary(body)},
            "safety_identifier": body.get("safety_identifier"),
            "service_tier": "default",
            "temperature": body.get("temperature"),
            "text": {"format": _shown_format((body.get("text") or {}).get("format") or {"type": "text"})},
            "tool_choice": _shown_choice(body.get("tool_choice") or "auto"),
            "tools": [_shown_tool(tool) for tool in body.get("tools") or ()],
            "top_logprobs": 0,
            "top_p": body.get("top_p"),
            "truncation": "disabled",
            "user": body.get("user"),
        }


_SAME = ("chat_template_kwargs", "parallel_tool_calls", *(name for name in SHARED if name not in _NOT_SHARED))
"""Fields that mean the same as in a chat."""


def read_request(body: Body) -> ResponseRequest:
    """Check the body's own fields. Raises InvalidRequest or Unsupported."""
    for name, said in _ELSEWHERE.items():
        if body.get(name) is not None:
            raise InvalidRequest.of(name, said)
    refuse_others(body, FIELDS)
    for name, harmless in _REFUSED.items():
        value = body.get(name)
        # By type too: in Python 0 equals False.
        if value is not None and not any(type(value) is type(other) and value == other for other in harmless):
            raise unsupported(name)
    for name in (
        *_HINTS,
        "metadata",
        "truncation",
        "include",
        "stream",
        "stream_options",
        "max_output_tokens",
    ):
        given(body, name, FIELDS[name])
    if body.get("stream_options") and not body.get("stream"):
        raise InvalidRequest.of("stream_options", "needs stream to be true")
    refuse_others(body.get("stream_options") or {}, ("include_obfuscation",), inside="stream_options.")
    _summary(body)
    return ResponseRequest(
        body=body,
        previous_id=given(body, "previous_response_id", text),
        asks_to_store=given(body, "store", boolean),
    )


def _summary(body: Body) -> str | None:
    """Return how the client wants the reasoning summed up, or None for not at all. Raises InvalidRequest."""
    asked = given(body, "reasoning", mapping) or {}
    found = None
    for name in _SUMMARY:
        value = asked.get(name)
        if value is not None and value not in SUMMARIES:
            raise InvalidRequest.of(f"reasoning.{name}", f"must be one of {', '.join(SUMMARIES)}")
        found = found or value
    return found


def _asks_nothing(value: Any) -> bool:
    return value is None or value is False or value == []


def _format(body: Body, ignored: list[str]) -> dict[str, Any]:
    """Return the chat's field for `text`. Raises InvalidRequest."""
    asked = given(body, "text", mapping) or {}
    refuse_others(asked, ("format", "verbosity"), inside="text.")
    ignored += ["text.verbosity"] if asked.get("verbosity") is not None else []
    if asked.get("format") is None:
        return {}
    form = mapping("text.format", asked["format"])
    refuse_others(form, ("type", "name", "description", "schema", "strict"), inside="text.format.")
    for name in ("name", "description"):
        if form.get(name) is not None:
            text(f"text.format.{name}", form[name])
    if form.get("strict") is not None:
        boolean("text.format.strict", form["strict"])
    if form.get("type") == "text":
        return {}
    others = [name for name in STRUCTURES if body.get(name) is not None]
    if others:
        raise InvalidRequest.of(others[0], "excludes text.format")
    if form.get("type") == "json_schema":
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}}
    return {"response_format": {"type": form.get("type")}}


def _effort(body: Body, ignored: list[str]) -> dict[str, Any]:
    """Return the chat's field for `reasoning`. Raises InvalidRequest."""
    asked = given(body, "reasoning", mapping) or {}
    refuse_others(asked, ("effort", *_SUMMARY, *_IGNORED_OF_REASONING), inside="reasoning.")
    ignored += [f"reasoning.{name}" for name in _IGNORED_OF_REASONING if asked.get(name) is not None]
    return {} if asked.get("effort") is None else {"reasoning_effort": asked["effort"]}


def _tools(body: Body) -> dict[str, Any]:
    """Return the chat's fields for the tools, in its nested form. Raises InvalidRequest or Unsupported."""
    tools = given(body, "tools", items) or []
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest.of("tools", f"at most {MAX_TOOLS} are allowed")
    nested = [_tool(f"tools[{number}]", tool) for number, tool in enumerate(tools)]
    choice = body.get("tool_choice")
    if not nested and choice == "auto":
        choice = None
    names = {tool["function"]["name"] for tool in nested}
    return {"tools": nested, "tool_choice": _choice(choice, names)}


def _tool(path: str, value: Any) -> dict[str, Any]:
    tool = mapping(path, value)
    if text(f"{path}.type", tool.get("type")) != "function":
        # A hosted tool, which nothing here could run.
        raise unsupported(f"{path}.type")
    for name in sorted(tool.keys() - set(_TOOL_KEYS)):
        if not _asks_nothing(tool[name]):
            raise InvalidRequest.of(path, "has unknown fields")
    function = {name: tool[name] for name in _TOOL_KEYS[1:] if tool.get(name) is not None}
    function_name(f"{path}.name", tool.get("name"))
    given(function, "description", Kind(lambda _, said: text(f"{path}.description", said), {}))
    given(function, "parameters", Kind(lambda _, said: mapping(f"{path}.parameters", said), {}))
    given(function, "strict", Kind(lambda _, said: boolean(f"{path}.strict", said), {}))
    return {"type": "function", "function": function}


def _choice(choice: Any, names: set[str]) -> Any:
    match choice:
        case {"type": "function"}:
            return _chosen("tool_choice", choice, names)
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools)}:
            chosen = [_chosen("tool_choice.tools", tool, names) for tool in tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": chosen}}
        case {"type": str()}:
            raise unsupported("tool_choice.type")
        case _:
            return choice


def _chosen(path: str, choice: Any, names: set[str]) -> dict[str, Any]:
    tool = mapping(path, choice)
    if tool.get("type") != "function":
        raise unsupported(f"{path}.type")
    if text(f"{path}.name", tool.get("name")) not in names:
        raise InvalidRequest.of(f"{path}.name", "must be the name of one of tools")
    return {"type": "function", "function": {"name": tool["name"]}}


def _shown_tool(tool: Body) -> dict[str, Any]:
    return {name: tool.get(name) for name in _TOOL_KEYS} | {"strict": tool.get("strict") or False}


def _shown_format(form: Body) -> dict[str, Any]:
    """Return a checked `text.format` as OpenAI's types have it."""
    if form["type"] != "json_schema":
        return {"type": form["type"]}
    shown = {name: form.get(name) for name in ("type", "description", "schema", "strict")}
    return {**shown, "name": form.get("name") or "response"}


def _shown_choice(choice: Any) -> Any:
    """Return a checked `tool_choice` with its known fields alone."""
    match choice:
        case {"type": "function", "name": name}:
            return {"type": "function", "name": name}
        case {"type": "allowed_tools", "mode": mode, "tools": tools}:
            return {"type": "allowed_tools", "mode": mode, "tools": [_shown_choice(tool) for tool in tools]}
        case _:
            return choice


def _renamed(error: InvalidRequest | Unsupported) -> InvalidRequest | Unsupported:
    """Return the error with names of this API."""
    (violation,) = error.violations
    field = json_name(violation.field, NAMES)
    is_of_messages = field.partition(".")[0].partition("[")[0] == "messages"
    return type(error).of("input" if is_of_messages else field, violation.description)
