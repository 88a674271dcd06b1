"""Messages requests: the body of /v1/messages or /v1/messages/count_tokens, translated to a chat and checked as one.

Owns the fields, and what becomes of `thinking`. Messages and tools have modules of their own.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from blockyard.proto.limits import COUNTS
from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import InvalidRequest, Unsupported
from blockyard.router.openai.anthropic.checks import closed, refuse_extra, required
from blockyard.router.openai.anthropic.content import MESSAGE_SCHEMA, SYSTEM_SCHEMA, chat_messages
from blockyard.router.openai.anthropic.tools import CHOICE_SCHEMA, TOOL_SCHEMA, chat_tools
from blockyard.router.openai.requests.chat import CHAT_FIELDS, chat_wanted
from blockyard.router.openai.requests.fields import (
    INT32,
    Body,
    Fields,
    Kind,
    boolean,
    given,
    integer,
    items,
    mapping,
    text,
    texts,
)
from blockyard.router.openai.requests.sampling import OUTPUT_TOKENS, SHARED
from blockyard.router.openai.requests.wanted import Wanted
from blockyard.router.parsing.formats import NO_FORMAT, AnswerFormat
from blockyard.router.request.chats import MAX_MESSAGES

LEAST_BUDGET_TOKENS = 1024
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
"""Values of `reasoning_effort` by the efforts of `output_config`."""
NAMES: Mapping[str, str] = {
    "input": "messages",
    "sampling.stop": "stop_sequences",
    "sampling.structured_output": "output_config.format",
    "response_format": "output_config.format",
}
"""Names of this API for fields of GenerateRequest and of a chat."""
_OURS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "allowed_token_ids"),
    *("bad_token_ids", "bad_words", "logit_bias", "regex", "truncate_prompt_tokens", "skip_special_tokens"),
    *("priority", "session_id", "cache_salt", "public_prefix", "expected_pause_seconds", "prefetch"),
)
"""Fields that mean the same as in a chat."""
_IGNORED = "Ignored: it changes no token."
_HINTS: Fields = {
    **dict.fromkeys(("metadata", "cache_control", "diagnostics"), mapping.said(_IGNORED)),
    **dict.fromkeys(("service_tier", "speed", "user_profile_id"), text.said(_IGNORED)),
    "context_management": mapping.said(
        "Ignored: the prompt has all that was sent, as far as the chat template shows it."
    ),
}
THREAD = "thread"
"""Field that asks the server to keep the conversation."""
_NEUTRAL: Mapping[str, Any] = {"container": None, "inference_geo": None, "mcp_servers": [], THREAD: None}
"""Refused fields, each with the value that asks for nothing. null always does."""
COUNT_FIELDS: Fields = {
    "model": SHARED["model"],
    "messages": items.then(
        lambda name, value: value, items=MESSAGE_SCHEMA, minItems=1, maxItems=MAX_MESSAGES
    ),
    "system": Kind(lambda name, value: value, SYSTEM_SCHEMA).said("Text, or blocks of text."),
    "tools": items.then(lambda name, value: value, items=TOOL_SCHEMA).said(
        "Tools that the model may call, and the client runs. With `strict`, their input always follows its schema."
    ),
    "tool_choice": mapping.then(lambda name, value: value, **CHOICE_SCHEMA).said(
        "How the tools may be called. Default auto."
    ),
    "thinking": mapping.then(
        lambda name, value: value,
        properties={
            "type": {"enum": ["enabled", "disabled", "adaptive"]},
            "budget_tokens": {"type": ["integer", "null"]},
            "display": {"enum": ["summarized", "omitted", None]},
        },
        required=["type"],
        additionalProperties=False,
    ).said("Turns reasoning on or off, where the chat template can. No budget is enforced but max_tokens."),
    "output_config": mapping.then(
        lambda name, value: value,
        properties={
            "effort": {"enum": [*EFFORTS, None]},
            "format": {
                "type": ["object", "null"],
                "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
                "required": ["type", "schema"],
                "additionalProperties": False,
            },
        },
        additionalProperties=False,
    ).said("`effort`, where the chat template takes it, and `format`: a JSON schema that the text follows."),
    "chat_template_kwargs": CHAT_FIELDS["chat_template_kwargs"],
    **_HINTS,
    **{
        name: Kind(lambda name, value: value, {"enum": [neutral, None]}).said("Not supported.")
        for name, neutral in _NEUTRAL.items()
    },
}
"""Fields of both routes, which make the prompt."""
FIELDS: Fields = {
    "max_tokens": integer(OUTPUT_TOKENS),
    "stop_sequences": items.then(
        lambda name, value: value, items={"type": "string", "minLength": 1}, maxItems=COUNTS["stop"]
    ).said("Texts that end the answer, which names the one that did."),
    "stream": boolean.said("Whether the answer comes as server-sent events. Default false."),
    **COUNT_FIELDS,
    **{name: SHARED[name] for name in _OURS},
}


def messages_wanted(body: Body, answers: AnswerFormat = NO_FORMAT) -> Wanted:
    """Return a body of /v1/messages as a checked request. `answers` is the format of the model's answers.

    Raises InvalidRequest or Unsupported.
    """
    refuse_extra(body, FIELDS)
    max_tokens = required(body, "max_tokens", FIELDS["max_tokens"])
    chat, ignored = _chat(body, answers, max_tokens)
    chat |= {name: body[name] for name in ("stream", *_OURS) if name in body}
    chat |= {"max_tokens": max_tokens, "stop": _stops(body)}
    wanted = chat_wanted(chat, answers)
    names = {
        **NAMES,
        **{field: name for field, name in wanted.names.items() if name in ("tools", "regex")},
    }
    return replace(wanted, names=names, answering=replace(wanted.answering, ignored=ignored))


def counted_chat(body: Body, answers: AnswerFormat) -> inference_pb2.Chat:
    """Return the chat of a body of /v1/messages/count_tokens. Raises InvalidRequest or Unsupported."""
    refuse_extra(body, COUNT_FIELDS)
    chat, _ = _chat(body, answers, None)
    return chat_wanted(chat, answers).requests[0].chat


def _chat(
    body: Body, answers: AnswerFormat, max_tokens: int | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the body of a chat with the same prompt, and the names of fields without effect."""
    for name, neutral in _NEUTRAL.items():
        if body.get(name) not in (None, neutral):
            raise Unsupported.of(name, "is not supported")
    for name, kind in _HINTS.items():
        given(body, name, kind)
    messages = chat_messages(body.get("system"), required(body, "messages", items))
    chat = {"model": body.get("model"), "messages": messages, **chat_tools(body)}
    if messages[-1]["role"] == "assistant":
        chat["continue_final_message"] = True
    variables, ignored = _thinking(body, answers, max_tokens)
    config = closed("output_config", given(body, "output_config", mapping) or {}, ("effort", "format"))
    if config.get("effort") is not None:
        effort = text("output_config.effort", config["effort"])
        if effort not in EFFORTS:
            raise InvalidRequest.of("output_config.effort", f"must be one of {', '.join(EFFORTS)}")
        if "reasoning_effort" in answers.variables:
            variables.setdefault("reasoning_effort", EFFORTS[effort])
        else:
            ignored.append("output_config.effort")
    if config.get("format") is not None:
        if body.get("regex") is not None:
            raise InvalidRequest.of("regex", "excludes output_config.format")
        chat["json_schema"] = _schema(config["format"])
    own = given(body, "chat_template_kwargs", COUNT_FIELDS["chat_template_kwargs"]) or {}
    if variables or own:
        chat["chat_template_kwargs"] = {**variables, **own}
    ignored += [name for name in _HINTS if body.get(name) is not None]
    return chat, tuple(sorted(ignored))


def _thinking(body: Body, answers: AnswerFormat, max_tokens: int | None) -> tuple[dict[str, Any], list[str]]:
    """Return variables of the chat template for `thinking`, and the names of what has no effect."""
    asked = given(body, "thinking", mapping)
    if asked is None:
        return {}, []
    kind = required(asked, "type", text, inside="thinking.")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise InvalidRequest.of("thinking.type", "must be enabled, disabled or adaptive")
    closed("thinking", asked, ("type",) if kind == "disabled" else ("type", "budget_tokens", "display"))
    ignored = [f"thinking.{name}" for name in ("budget_tokens", "display") if asked.get(name) is not None]
    if kind == "enabled":
        _check_budget(required(asked, "budget_tokens", integer(INT32), inside="thinking."), max_tokens)
    elif asked.get("budget_tokens") is not None:
        integer(INT32)("thinking.budget_tokens", asked["budget_tokens"])
    if asked.get("display") not in (None, "summarized", "omitted"):
        raise InvalidRequest.of("thinking.display", "must be summarized or omitted")
    if asked.get("display") == "summarized":
        ignored.remove("thinking.display")
    if "enable_thinking" in answers.variables:
        return {"enable_thinking": kind != "disabled"}, ignored
    if kind == "disabled" and "reasoning_effort" in answers.variables:
        return {"reasoning_effort": "none"}, ignored
    # The model reasons or not as its template has it, so one of the two kinds is what it does anyway.
    if answers.reads_reasoning is (kind == "disabled"):
        ignored.append("thinking")
    return {}, ignored


def _check_budget(budget_tokens: int, max_tokens: int | None) -> None:
    if budget_tokens < LEAST_BUDGET_TOKENS:
        raise InvalidRequest.of(
            "thinking.budget_tokens", f"Input should be greater than or equal to {LEAST_BUDGET_TOKENS}"
        )
    if max_tokens is not None and max_tokens <= budget_tokens:
        raise InvalidRequest.of("max_tokens", "must be greater than `thinking.budget_tokens`")


def _stops(body: Body) -> list[str]:
    stops = given(body, "stop_sequences", items) or []
    if len(stops) > COUNTS["stop"]:
        raise InvalidRequest.of("stop_sequences", f"at most {COUNTS['stop']} are allowed")
    return texts("stop_sequences", stops)


def _schema(value: Any) -> Body:
    path = "output_config.format"
    asked = closed(path, value, ("type", "schema"))
    if required(asked, "type", text, inside=f"{path}.") != "json_schema":
        raise InvalidRequest.of(f"{path}.type", "must be json_schema")
    return required(asked, "schema", mapping, inside=f"{path}.")
