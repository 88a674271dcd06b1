"""Parsers by a response template: what transformers' regions mean, however the text is cut."""

import json
from typing import Any

import pytest
from blockyard.router.parsing.events import Arguments, CallBegun, Event, Said, Thought, merged
from blockyard.router.parsing.template_parser import TemplateParser
from hypothesis import given
from hypothesis import strategies as st

CODER: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>)"},
    },
}
"""Template of Qwen3.5 and Qwen3-Coder."""
JSON_CALLS: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}
ADD = {"properties": {"a": {"type": "integer"}, "b": {"type": "array"}, "c": {"type": "string"}}}
TOOLS = {"add": ADD, "now": None}
XML_CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[true]\n</parameter>\n"
    "<parameter=c>\n2 🌧\n</parameter>\n</function>\n</tool_call>"
)
XML_READ = [CallBegun("add"), Arguments('{"a": 1, "b": [true], "c": "2 🌧"}')]
JSON_CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
JSON_READ = [CallBegun("add"), Arguments('{"a": 1}')]
PROMPT = "<|im_start|>user\n<think>?<|im_end|>\n<|im_start|>assistant\n"
CASES: dict[str, tuple[dict[str, Any], str, str, list[Event]]] = {
    "text": (CODER, PROMPT, "\nHello <b>you</b>. ", [Said("Hello <b>you</b>.")]),
    "two calls after reasoning": (
        CODER,
        PROMPT,
        f"<think>\nHm.\n</think>\n\nLook:\n\n{XML_CALL}\n{XML_CALL}<|im_end|>",
        [Thought("Hm."), Said("Look:"), *XML_READ, *XML_READ],
    ),
    "the prompt has begun the reasoning": (
        CODER,
        PROMPT + "<think>\n",
        f"Hm.\n</think>\n{XML_CALL}",
        [Thought("Hm."), *XML_READ],
    ),
    "the prompt's end has no answer's beginning": (CODER, "<think>", "Yes.", [Said("Yes.")]),
    "a value that is not of its type": (
        CODER,
        PROMPT,
        "<tool_call><function=add><parameter=a>one</parameter></function></tool_call>",
        [CallBegun("add"), Arguments('{"a": "one"}')],
    ),
    "an unknown tool": (
        CODER,
        PROMPT,
        "Hm <tool_call><function=remove><parameter=a>1</parameter></function></tool_call>.",
        [Said("Hm<parameter=a>1</parameter>.")],
    ),
    "calls in JSON": (JSON_CALLS, PROMPT, f"<think>Hm.</think>{JSON_CALL}", [Thought("Hm."), *JSON_READ]),
    "no arguments": (
        JSON_CALLS,
        PROMPT,
        '<tool_call>{"name": "now"}</tool_call>',
        [CallBegun("now"), Arguments("{}")],
    ),
    "bad JSON": (JSON_CALLS, PROMPT, "<tool_call>{name: add}</tool_call>", [Said("{name: add}")]),
    "a list instead of a call": (JSON_CALLS, PROMPT, "<tool_call>[1]</tool_call>", [Said("[1]")]),
    "a call that is cut": (JSON_CALLS, PROMPT, '<tool_call>{"name": "ad', [Said('{"name": "ad')]),
}


def parsed(template: dict[str, Any], prompt: str, pieces: list[str], tools: Any = TOOLS) -> list[Event]:
    parser = TemplateParser(template, tools, prompt)
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged([*events, *parser.finish()])


@pytest.mark.parametrize("name", CASES)
def test_each_text_means_its_events_however_it_is_cut(name: str) -> None:
    template, prompt, text, events = CASES[name]
    assert parsed(template, prompt, [text]) == events
    assert parsed(template, prompt, list(text)) == events
    for at in range(len(text)):
        assert parsed(template, prompt, [text[:at], text[at:]]) == events


def test_calls_are_text_where_the_client_has_no_tools() -> None:
    assert parsed(JSON_CALLS, PROMPT, [JSON_CALL], {}) == [Said(JSON_CALL)]


WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=add>", "</function>", "<|im_end|>"]
WORDS += [*"{}< \nü1", "<parameter=a>", "</parameter>", '"name": "add"', json.dumps({"a": 1})]


@given(text=st.lists(st.sampled_from(WORDS), max_size=16).map("".join), size=st.integers(1, 9))
@pytest.mark.parametrize("template", [CODER, JSON_CALLS])
def test_any_text_is_parsed_the_same_in_pieces(template: dict[str, Any], text: str, size: int) -> None:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert parsed(template, PROMPT, pieces) == parsed(template, PROMPT, [text])
