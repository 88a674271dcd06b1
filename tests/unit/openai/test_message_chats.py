"""Requests of Anthropic's Messages API as chats: what each field becomes, and that any JSON is taken or refused."""

import contextlib
import copy
from typing import Any

import pytest
from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import RouterError
from blockyard.router.openai.anthropic.request import COUNT_FIELDS, counted_chat, messages_wanted
from blockyard.router.openai.requests.chat import chat_wanted
from blockyard.router.parsing.formats import THINK, AnswerFormat
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples

from .test_messages import ADD, CALLED, FORMAT, HELLO, RESULT, SCHEMA, TEXT, WEATHER, turns

pytestmark = pytest.mark.asyncio(loop_scope="module")


def chat_of(body: dict[str, Any]) -> inference_pb2.GenerateRequest:
    return messages_wanted({"max_tokens": 9, **body}, FORMAT).requests[0]


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"messages": HELLO}, {"messages": HELLO}),
        (
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, *HELLO],
                "system": [
                    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"},
                    {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}},
                    {"type": "text", "text": "c"},
                ],
            },
            {
                "messages": [
                    {"role": "system", "content": "b\nc"},
                    {"role": "user", "content": "a\nhello"},
                ]
            },
        ),
        (
            {
                "messages": [
                    *HELLO,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
                            {"type": "text", "text": "I "},
                            {"type": "text", "text": "look."},
                            CALLED,
                            {**CALLED, "id": "toolu_2", "name": "add", "input": {}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "toolu_2",
                                "is_error": True,
                                "content": "no",
                            },
                            {
                                "type": "tool_result",
                                "tool_use_id": "toolu_1",
                                "content": [
                                    {"type": "text", "text": "rain"},
                                    {"type": "text", "text": "wind"},
                                ],
                            },
                            {"type": "text", "text": "And now?"},
                        ],
                    },
                    {"role": "system", "content": "Be brief."},
                ],
            },
            {
                "messages": [
                    *HELLO,
                    {
                        "role": "assistant",
                        "content": "I look.",
                        "reasoning_content": "Hm.",
                        "tool_calls": [
                            {
                                "id": "toolu_1",
                                "type": "function",
                                "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
                            },
                            {
                                "id": "toolu_2",
                                "type": "function",
                                "function": {"name": "add", "arguments": "{}"},
                            },
                        ],
                    },
                    {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no"},
                    {"role": "tool", "tool_call_id": "toolu_1", "content": "rain\nwind"},
                    {"role": "user", "content": "And now?"},
                    {"role": "system", "content": "Be brief."},
                ]
            },
        ),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "The answer is"}]},
            {
                "messages": [*HELLO, {"role": "assistant", "content": "The answer is"}],
                "continue_final_message": True,
            },
        ),
        ({"messages": [*HELLO, {"role": "assistant", "content": []}]}, {"messages": HELLO}),
        (
            {
                "messages": HELLO,
                "stop_sequences": ["a", "b"],
                "metadata": {"user_id": "me"},
                "top_k": 4,
                "session_id": "s",
                "priority": 2,
                "cache_salt": "t",
            },
            {
                "messages": HELLO,
                "stop": ["a", "b"],
                "top_k": 4,
                "session_id": "s",
                "priority": 2,
                "cache_salt": "t",
            },
        ),
        (
            {"messages": HELLO, "thinking": {"type": "disabled"}},
            {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}},
        ),
        (
            {
                "messages": HELLO,
                "thinking": {"type": "adaptive", "budget_tokens": 0},
                "output_config": {"effort": "max"},
                "chat_template_kwargs": {"more": 1},
            },
            {
                "messages": HELLO,
                "chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "xhigh", "more": 1},
            },
        ),
        (
            {"messages": HELLO, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {"messages": HELLO, "json_schema": SCHEMA},
        ),
        *(
            (
                {"messages": HELLO, "tools": [{**WEATHER, "strict": True}, ADD], **choice},
                {
                    "messages": HELLO,
                    "tools": [
                        {
                            "type": "function",
                            "function": {
                                "name": "get_weather",
                                "description": "The weather.",
                                "parameters": SCHEMA,
                                "strict": True,
                            },
                        },
                        {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
                    ],
                    **chosen,
                },
            )
            for choice, chosen in (
                ({}, {}),
                ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
                ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
                (
                    {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
                    {"tool_choice": "auto", "parallel_tool_calls": False},
                ),
                (
                    {"tool_choice": {"type": "tool", "name": "add"}},
                    {"tool_choice": {"type": "function", "function": {"name": "add"}}},
                ),
            )
        ),
    ],
)
async def test_a_request_is_the_chat_that_means_the_same(body: dict[str, Any], chat: dict[str, Any]) -> None:
    assert chat_of(body) == chat_wanted({"max_tokens": 9, **chat}, FORMAT).requests[0]


@pytest.mark.parametrize(
    ("format", "body", "ignored"),
    [
        (FORMAT, {"thinking": {"type": "adaptive"}}, ()),
        (FORMAT, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, ("thinking.budget_tokens",)),
        (AnswerFormat(), {"thinking": {"type": "adaptive"}}, ("thinking",)),
        (AnswerFormat(), {"thinking": {"type": "disabled"}}, ()),
        (AnswerFormat(reasoning=THINK), {"thinking": {"type": "disabled"}}, ("thinking",)),
        (
            AnswerFormat(reasoning=THINK),
            {"thinking": {"type": "adaptive", "display": "omitted"}},
            ("thinking.display",),
        ),
        (
            AnswerFormat(),
            {"output_config": {"effort": "low"}, "metadata": {}, "context_management": {"edits": []}},
            ("context_management", "metadata", "output_config.effort"),
        ),
    ],
)
async def test_what_has_no_effect_is_named(
    format: AnswerFormat, body: dict[str, Any], ignored: tuple[str, ...]
) -> None:
    wanted = messages_wanted({"messages": HELLO, "max_tokens": 2000, **body}, format)
    assert wanted.answering.ignored == ignored


JSON: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([None, True, 0, 5000, -1.5, 10**30, "", "x", "text", "tool_use", "auto", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["type", "text", "content", "role", "name", "x y"]), inner, max_size=3
        )
    ),
    max_leaves=5,
)


RICH: dict[str, Any] = {
    **turns("x", [{"type": "thinking", "thinking": "Hm."}, TEXT, CALLED], [RESULT, TEXT], [TEXT]),
    "max_tokens": 2000,
    "system": [TEXT],
    "tools": [WEATHER, {**ADD, "strict": True}],
    "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": None},
    "output_config": {"effort": "low", "format": None},
    "stop_sequences": ["a"],
    "metadata": {"user_id": "me"},
    "chat_template_kwargs": {"more": 1},
}


@examples(300)
@given(data=st.data())
async def test_any_json_in_any_place_is_taken_or_refused(data: st.DataObject) -> None:
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
