"""Requests of Anthropic's Messages API as chats: what each field becomes, and that any JSON is taken or refused."""

import contextlib
import copy
from typing import Any

import pytest
from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import RouterError
from blockyard.router.openai.anthropic.request import COUNT_FIELDS, counted_chat, messages_wanted
from blockyard.router.openai.requests.chat import chat_wanted
from blockyard.router.parsing.formats import HERMES, THINK, AnswerFormat
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples

from .rig import (
    ADD,
    CLAUDES_ADD,
    CLAUDES_WEATHER,
    HELLO,
    SCHEMA,
    STRICT,
    TEXT,
    TOOL_RESULT,
    TOOL_USE,
    turns,
)

VARIABLES = frozenset({"enable_thinking", "reasoning_effort"})
FORMAT = AnswerFormat(tools=HERMES, reasoning=THINK, variables=VARIABLES)
CACHED = {"cache_control": {"type": "ephemeral"}}
SAID = [{"type": "text", "text": "I "}, {"type": "text", "text": "look."}]
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}
MORE_CALLED = {**TOOL_USE, "id": "toolu_2", "name": "add", "input": {}}
RAIN = {**TOOL_RESULT, "content": [{"type": "text", "text": "rain"}, {"type": "text", "text": "wind"}]}
FAILED = {**TOOL_RESULT, "tool_use_id": "toolu_2", "is_error": True, "content": "no"}


def called(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


ANSWER = {
    "role": "assistant",
    "content": "I look.",
    "reasoning_content": "Hm.",
    "tool_calls": [called("toolu_1", "get_weather", '{"city": "Oslo"}'), called("toolu_2", "add", "{}")],
}
SYSTEM = {"role": "system", "content": "Be brief."}
BILLED = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"}
PREFILLED = [*HELLO, {"role": "assistant", "content": "The answer is"}]
SAME = {"messages": HELLO, "top_k": 4, "session_id": "s", "priority": 2, "cache_salt": "t"}
USING = {"messages": HELLO, "tools": [{**CLAUDES_WEATHER, "strict": True}, CLAUDES_ADD]}
USED = {
    "messages": HELLO,
    "tools": [STRICT, {**ADD, "function": {"name": "add", "parameters": {"type": "object"}}}],
}
ONLY_ADD = {"type": "function", "function": {"name": "add"}}
DEEPEST = {"messages": HELLO, "output_config": {"effort": "max"}, "thinking": {"type": "adaptive"}}


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        (
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, *HELLO],
                "system": [BILLED, {"type": "text", "text": "b", **CACHED}, {"type": "text", "text": "c"}],
            },
            {"messages": [{"role": "system", "content": "b\nc"}, {"role": "user", "content": "a\nhello"}]},
        ),
        (
            {
                "messages": [
                    *turns("hello", [THOUGHT, *SAID, TOOL_USE, MORE_CALLED], [FAILED, RAIN, TEXT])[
                        "messages"
                    ],
                    SYSTEM,
                ]
            },
            {
                "messages": [
                    *(*HELLO, ANSWER),
                    {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no"},
                    {"role": "tool", "tool_call_id": "toolu_1", "content": "rain\nwind"},
                    *({"role": "user", "content": "x"}, SYSTEM),
                ]
            },
        ),
        ({"messages": PREFILLED}, {"messages": PREFILLED, "continue_final_message": True}),
        ({"messages": [*HELLO, {"role": "assistant", "content": []}]}, {"messages": HELLO}),
        (
            {**SAME, "stop_sequences": ["a", "b"], "metadata": {"user_id": "me"}},
            {**SAME, "stop": ["a", "b"]},
        ),
        (
            {"messages": HELLO, "thinking": {"type": "disabled"}},
            {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}},
        ),
        (
            {**DEEPEST, "chat_template_kwargs": {"more": 1}},
            {
                "messages": HELLO,
                "chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "xhigh", "more": 1},
            },
        ),
        (
            {"messages": HELLO, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {"messages": HELLO, "json_schema": SCHEMA},
        ),
        (USING, USED),
        ({**USING, "tool_choice": {"type": "any"}}, {**USED, "tool_choice": "required"}),
        ({**USING, "tool_choice": {"type": "none"}}, {**USED, "tool_choice": "none"}),
        (
            {**USING, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {**USED, "tool_choice": "auto", "parallel_tool_calls": False},
        ),
        ({**USING, "tool_choice": {"type": "tool", "name": "add"}}, {**USED, "tool_choice": ONLY_ADD}),
    ],
)
def test_a_request_is_the_chat_that_means_the_same(body: dict[str, Any], chat: dict[str, Any]) -> None:
    def request(wanted: Any, asked: dict[str, Any]) -> inference_pb2.GenerateRequest:
        found: inference_pb2.GenerateRequest = wanted({"max_tokens": 9, **asked}, FORMAT).requests[0]
        return found

    assert request(messages_wanted, body) == request(chat_wanted, chat)


OMITTED = {"thinking": {"type": "adaptive", "display": "omitted"}}
HINTS = {"output_config": {"effort": "low"}, "metadata": {}, "context_management": {"edits": []}}


@pytest.mark.parametrize(
    ("format", "body", "ignored"),
    [
        (FORMAT, {"thinking": {"type": "adaptive"}}, ()),
        (FORMAT, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, ("thinking.budget_tokens",)),
        (AnswerFormat(), {"thinking": {"type": "adaptive"}}, ("thinking",)),
        (AnswerFormat(), {"thinking": {"type": "disabled"}}, ()),
        (AnswerFormat(reasoning=THINK), {"thinking": {"type": "disabled"}}, ("thinking",)),
        (AnswerFormat(reasoning=THINK), OMITTED, ("thinking.display",)),
        (AnswerFormat(), HINTS, ("context_management", "metadata", "output_config.effort")),
    ],
)
def test_what_has_no_effect_is_named(
    format: AnswerFormat, body: dict[str, Any], ignored: tuple[str, ...]
) -> None:
    wanted = messages_wanted({"messages": HELLO, "max_tokens": 2000, **body}, format)
    assert wanted.answering.ignored == ignored


WORDS = st.sampled_from(["type", "text", "content", "role", "name", "x y"])
JSON: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([None, True, 0, 5000, -1.5, 10**30, "", "x", "text", "tool_use", "auto", "\ud800"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)
RICH: dict[str, Any] = {
    **turns("x", [THOUGHT, TEXT, TOOL_USE], [TOOL_RESULT, TEXT], [TEXT]),
    "max_tokens": 2000,
    "system": [TEXT],
    "tools": [CLAUDES_WEATHER, {**CLAUDES_ADD, "strict": True}],
    "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": None},
    "output_config": {"effort": "low", "format": None},
    "stop_sequences": ["a"],
    "metadata": {"user_id": "me"},
    "chat_template_kwargs": {"more": 1},
}


@examples(300)
@given(data=st.data())
def test_any_json_in_any_place_is_taken_or_refused(data: st.DataObject) -> None:
    """Anything else would be an error of the router."""
    body: Any = copy.deepcopy(RICH)
    place, key = body, data.draw(st.sampled_from(sorted(body)))
    while isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[key] = data.draw(JSON)
    with contextlib.suppress(RouterError):
        messages_wanted(body, FORMAT)
    with contextlib.suppress(RouterError):
        counted_chat({name: value for name, value in body.items() if name in COUNT_FIELDS}, FORMAT)
