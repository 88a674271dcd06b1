"""The parsers of outputs: what each family's text means, and that it does not depend on how the text is cut."""

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from blockyard.router.parsing.events import (
    AnswerParser,
    Arguments,
    CallBegun,
    Event,
    Said,
    Thought,
    merged,
)
from blockyard.router.parsing.formats import (
    HERMES,
    LLAMA3,
    MISTRAL_LIST,
    MISTRAL_NAMED,
    MISTRAL_THINK,
    NO_END,
    THINK,
    AnswerFormat,
    PromptEnd,
    ReasoningFormat,
    ToolFormat,
)
from blockyard.router.parsing.reading import Reading
from blockyard.router.parsing.text_parser import TextParser
from hypothesis import given
from hypothesis import strategies as st

TOOLS = ("add", "get_weather")
WEATHER = '{"city": "Zürich 🌧️", "note": "a \\"}</tool_call>{[ \\\\"}'
ADD = '{"a": 1, "b": [2, {"c": null}]}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    says: str
    text: str
    events: list[Event]
    calls: ToolFormat | None = HERMES
    reasoning: ReasoningFormat | None = THINK
    is_thinking: bool = False
    end: PromptEnd = NO_END
    """The prompt's end. One with a beginning of the answer needs no `is_thinking`."""
    tools: tuple[str, ...] = field(default=TOOLS)

    def parser(self) -> AnswerParser:
        if self.end:
            known = AnswerFormat(tools=self.calls, reasoning=self.reasoning)
            tools = dict.fromkeys(self.tools)
            return Reading(format=known, tools=tools, reads_reasoning=self.reasoning is not None).parser(
                self.end
            )
        return TextParser(self.calls, self.reasoning, self.tools, is_thinking=self.is_thinking)


def case(says: str, text: str, *events: Event, **fields: Any) -> Case:
    """Return a case of an answer. Without events, all of it is said."""
    return Case(says=says, text=text, events=[*events] or [Said(text)], **fields)


def continued(begun: str, text: str, events: list[Event], **fields: Any) -> Case:
    """Return a case of an answer that the prompt begins."""
    end = PromptEnd("user<|im_end|>", begun)
    return case(f"continues {begun!r}", text, *events, end=end, **fields)


def call(name: str, arguments: str) -> list[Event]:
    return [CallBegun(name), Arguments(arguments)]


def tagged(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CALL_HEAD = '<tool_call>\n{"name": "add", "arguments": {"a": 1'
REASONED = [Thought(" see."), Said("Hi.")]
CONTINUED = [
    continued("<think>\nLet me", " see.\n</think>\n\nHi.", REASONED),
    continued("assistant\n<think>\nLet me", " see.</think>Hi.", REASONED),
    continued("<think>\n\n</think>\n\n<think>\nLet me", " see.\n</think>\n\nHi.", REASONED),
    continued("[THINK]Let me", " see.[/THINK]Hi.", REASONED, reasoning=MISTRAL_THINK, calls=MISTRAL_LIST),
    continued("<think>\nLet me ", "see.\n</think>\n\nHi.", [Thought("see."), Said("Hi.")]),
    continued("<think>\n", "Hm.\n</think>\n\nHi.", [Thought("Hm."), Said("Hi.")]),
    continued("<think>\nHm.</th", "ink>\nHi.", [Said("Hi.")]),
    continued("<think>\na </t", "able>b</think>Hi.", [Thought("able>b"), Said("Hi.")]),
    continued("<think>\nHm.\n</think>\n\n", "Hi.", [Said("Hi.")]),
    continued("<think>\nHm.\n</think>\n\nSo", " it is.", [Said(" it is.")]),
    continued("Leaves fall ", "down.", [Said("down.")]),
    continued("Leaves fall", "\ndown. <think> again", [Said("\ndown. <think> again")]),
    continued("a <tool", "bar>", [Said("bar>")]),
    continued(
        "So: <tool_call>\n", '{"name": "add", "arguments": {"a": 1}}\n</tool_call>', call("add", '{"a": 1}')
    ),
    continued("<tool_c", 'all>{"name": "add", "arguments": {"a": 1}}</tool_call>', call("add", '{"a": 1}')),
    continued(CALL_HEAD, "2}}\n</tool_call>", call("add", '{"a": 12}')),
    continued('<tool_call>\n{"na', 'me": "add", "arguments": {}}\n</tool_call>', call("add", "{}")),
    continued(tagged("add", "{}"), tagged("add", ADD), call("add", ADD)),
    continued(tagged("add", "{}") + "\n" + CALL_HEAD, "}}\n</tool_call>", call("add", '{"a": 1}')),
    continued("[TOOL_CALLS]add[ARGS]", ADD, call("add", ADD), calls=MISTRAL_NAMED),
    continued("[TOOL_CALLS]add[ARGS]" + ADD[:9], ADD[9:], call("add", ADD), calls=MISTRAL_NAMED),
    continued("\n\n" + '{"name": "add", "parameters": {"a"', ": 1}}", call("add", '{"a": 1}'), calls=LLAMA3),
    continued(CALL_HEAD, "2}}", [Said("2}}")], tools=()),
    continued("<think>\nLet me", " see.</think>Hi.", [Said(" see.</think>Hi.")], reasoning=None),
]
CALL_ADD, CALL_WEATHER = call("add", ADD), call("get_weather", WEATHER)
EMPTY = call("add", "{}")
NAMED = f"[TOOL_CALLS]add[ARGS]{ADD}[TOOL_CALLS]get_weather[CALL_ID]abc123DEF[ARGS]{WEATHER}"
LISTED = (
    f'{{"name": "add", "arguments": {ADD}}}, {{"name": "get_weather", "arguments": {WEATHER}, "id": "abc"}}'
)
ONE, OTHER = f'"name": "add", "parameters": {ADD}', f'"name": "get_weather", "parameters": {WEATHER}'
TWICE = f'{{{ONE}}}; {{"type": "function", {OTHER}}}'
THOUGHT = "Hm, <tool_call> or <i>not</i>."
CASES = [
    *CONTINUED,
    case("plain text", " Hello\n\nyou <b>there</b>. \n"),
    case(
        "Qwen3 thinks and calls twice",
        f"<think>\n{THOUGHT}\n</think>\n\n{tagged('get_weather', WEATHER)}\n{tagged('add', ADD)}",
        *(Thought(THOUGHT), *CALL_WEATHER, *CALL_ADD),
    ),
    case(
        "Qwen3 does not think, and speaks around its call",
        f"<think>\n\n</think>\n\nOne moment:\n\n{tagged('add', ADD)}\nDone </think>. ",
        *(Said("One moment:"), *CALL_ADD, Said("Done </think>. ")),
    ),
    case(
        "the prompt has begun the reasoning",
        "\nI see.\n</think>\nYes <think>.",
        *(Thought("I see."), Said("Yes <think>.")),
        is_thinking=True,
    ),
    case("reasoning is cut off", "<think>I am thinking </thi", Thought("I am thinking </thi")),
    case("a word that is no mark", "<thing> and <tool>"),
    case("calls are content where the client has no tools", f"Look:\n{tagged('add', ADD)}\n", tools=()),
    case(
        "an unknown tool is content",
        f"Hm.\n{tagged('remove', ADD)}\n{tagged('add', ADD)}",
        *(Said(f"Hm.\n{tagged('remove', ADD)}"), *CALL_ADD),
    ),
    case("bad JSON is content", "<tool_call>\n{'name': 'add'}\n</tool_call>"),
    case("no JSON at all is content", "The tag <tool_call> begins a call."),
    case("a call that is cut within its name is content", 'Hm. <tool_call>\n{"name": "ad'),
    case(
        "a call that is cut within its arguments has a part of them",
        '<tool_call>\n{"name": "add", "arguments": {"a": [1, "x\\"',
        *call("add", '{"a": [1, "x\\"'),
    ),
    case(
        "a call that is cut before its arguments has none",
        '<tool_call>\n{"name": "add", "argum',
        CallBegun("add"),
    ),
    case(
        "an object that is not closed ends with its tag",
        '<tool_call>{"name": "add", "arguments": {"a": 1}\n</tool_call> So.',
        *(*call("add", '{"a": 1}'), Said("So.")),
    ),
    case(
        "arguments that are not closed end with their tag",
        '<tool_call>{"name": "add", "arguments": {"a": 1\n</tool_call>',
        *call("add", '{"a": 1\n'),
    ),
    case(
        "arguments before the name, and other keys",
        f'<tool_call>{{"id": 7, "arguments": {ADD}, "name": "add", "more": [1, {{}}]}}</tool_call>',
        *CALL_ADD,
    ),
    case("arguments as a string of JSON", tagged("add", json.dumps(ADD)), *CALL_ADD),
    case(
        "no arguments",
        '<tool_call>{"name":"add"}</tool_call><tool_call>{"name": "add", "arguments": null}</tool_call>',
        *(*EMPTY, *EMPTY),
    ),
    case(
        "a brace too many is content",
        '<tool_call>{"name":"add","arguments":{}}}</tool_call>',
        *(*EMPTY, Said("}</tool_call>")),
    ),
    case("Llama 3 calls twice", TWICE, *CALL_ADD, *CALL_WEATHER, calls=LLAMA3),
    case(
        "Llama 3 calls after its tag",
        f'I look. <|python_tag|>{{"name": "add", "parameters": {ADD}}}',
        *(Said("I look."), *CALL_ADD),
        calls=LLAMA3,
    ),
    case("Llama 3 answers with JSON of its own", '\n{"answer": {"name": "add"}}\n', calls=LLAMA3),
    case(
        "Llama 3 goes on after a call",
        f'{{"name": "add", "parameters": {ADD}}}; and {{"name": "add"}}',
        *(*CALL_ADD, Said('; and {"name": "add"}')),
        calls=LLAMA3,
    ),
    case("Llama 3 writes Python", '<|python_tag|>brave.call(query="x")', calls=LLAMA3),
    case(
        "Mistral lists its calls",
        f"Well.[TOOL_CALLS] [{LISTED}]",
        *(Said("Well."), *CALL_ADD, *CALL_WEATHER),
        calls=MISTRAL_LIST,
    ),
    case("Mistral names its calls", NAMED, *CALL_ADD, *CALL_WEATHER, calls=MISTRAL_NAMED),
    case(
        "Mistral thinks, and names a call without a tag before its arguments",
        f"[THINK]Which one?[/THINK]This one.[TOOL_CALLS]add{ADD}",
        *(Thought("Which one?"), Said("This one."), *CALL_ADD),
        calls=MISTRAL_NAMED,
        reasoning=MISTRAL_THINK,
    ),
    case("Mistral names an unknown tool", f"[TOOL_CALLS]remove[ARGS]{ADD}", calls=MISTRAL_NAMED),
    case("Mistral is cut within a name", "Hm [TOOL_CALLS]get_wea", calls=MISTRAL_NAMED),
    case("Mistral is cut before its arguments", "[TOOL_CALLS]add[AR", calls=MISTRAL_NAMED),
]
BY_NAME = pytest.mark.parametrize("case", CASES, ids=lambda case: case.says)


def parsed(case: Case, pieces: list[str]) -> list[Event]:
    parser = case.parser()
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged([*events, *parser.finish()])


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({0, len(text), *places})
    return [text[start:end] for start, end in pairwise(ends)]


@BY_NAME
def test_each_text_means_its_events_however_it_and_its_beginnings_are_cut(case: Case) -> None:
    """A beginning is what `max_tokens` leaves of an output."""
    length = len(case.text)
    assert parsed(case, [case.text]) == parsed(case, list(case.text)) == case.events
    for first in range(length):
        for second in range(first, min(first + 24, length)):
            assert parsed(case, cut(case.text, [first, second])) == case.events
    for end in range(length):
        part = case.text[:end]
        assert parsed(case, list(part)) == parsed(case, [part])


MARKS = "<think> </think> <tool_call> </tool_call> [TOOL_CALLS] [ARGS] [THINK] [/THINK] <|python_tag|>"
SIGNS = '"name" "add" "arguments" "parameters" add { } [ ] : , ; " \\ < 1 ü 🌧 null'
ALPHABET = [*MARKS.split(), *SIGNS.split(), " ", "\n", '"name": "add", "arguments": ']
FORMATS = st.sampled_from([HERMES, LLAMA3, MISTRAL_LIST, MISTRAL_NAMED, None])


@given(
    text=st.lists(st.sampled_from(ALPHABET), max_size=24).map("".join),
    places=st.lists(st.integers(0, 200), max_size=8),
    calls=FORMATS,
    reasoning=st.sampled_from([THINK, MISTRAL_THINK, None]),
    is_thinking=st.booleans(),
)
def test_any_text_means_the_same_however_it_is_cut_and_without_calls_nothing_is_lost(
    text: str,
    places: list[int],
    calls: ToolFormat | None,
    reasoning: ReasoningFormat | None,
    is_thinking: bool,
) -> None:
    case = Case(says="", text=text, events=[], calls=calls, reasoning=reasoning, is_thinking=is_thinking)
    whole = parsed(case, [text])
    assert parsed(case, cut(text, [place for place in places if place < len(text)])) == whole
    assert parsed(case, list(text)) == whole
    if reasoning is None and not any(isinstance(event, CallBegun) for event in whole):
        assert whole == ([Said(text)] if text else [])
