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


def continued(begun: str, text: str, events: list[Event], **fields: Any) -> Case:
    """Return a case of an answer that the prompt begins."""
    return Case(
        says=f"continues {begun!r}",
        end=PromptEnd("user<|im_end|>", begun),
        text=text,
        events=events,
        **fields,
    )


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
CASES = [
    *CONTINUED,
    Case(
        says="plain text",
        text=" Hello\n\nyou <b>there</b>. \n",
        events=[Said(" Hello\n\nyou <b>there</b>. \n")],
    ),
    Case(
        says="Qwen3 thinks and calls twice",
        text="<think>\nHm, <tool_call> or <i>not</i>.\n</think>\n\n"
        f"{tagged('get_weather', WEATHER)}\n{tagged('add', ADD)}",
        events=[
            Thought("Hm, <tool_call> or <i>not</i>."),
            *call("get_weather", WEATHER),
            *call("add", ADD),
        ],
    ),
    Case(
        says="Qwen3 does not think, and speaks around its call",
        text=f"<think>\n\n</think>\n\nOne moment:\n\n{tagged('add', ADD)}\nDone </think>. ",
        events=[Said("One moment:"), *call("add", ADD), Said("Done </think>. ")],
    ),
    Case(
        says="the prompt has begun the reasoning",
        text="\nI see.\n</think>\nYes <think>.",
        is_thinking=True,
        events=[Thought("I see."), Said("Yes <think>.")],
    ),
    Case(
        says="reasoning is cut off",
        text="<think>I am thinking </thi",
        events=[Thought("I am thinking </thi")],
    ),
    Case(says="a word that is no mark", text="<thing> and <tool>", events=[Said("<thing> and <tool>")]),
    Case(
        says="calls are content where the client has no tools",
        text=f"Look:\n{tagged('add', ADD)}\n",
        tools=(),
        events=[Said(f"Look:\n{tagged('add', ADD)}\n")],
    ),
    Case(
        says="an unknown tool is content",
        text=f"Hm.\n{tagged('remove', ADD)}\n{tagged('add', ADD)}",
        events=[Said(f"Hm.\n{tagged('remove', ADD)}"), *call("add", ADD)],
    ),
    Case(
        says="bad JSON is content",
        text="<tool_call>\n{'name': 'add'}\n</tool_call>",
        events=[Said("<tool_call>\n{'name': 'add'}\n</tool_call>")],
    ),
    Case(
        says="no JSON at all is content",
        text="The tag <tool_call> begins a call.",
        events=[Said("The tag <tool_call> begins a call.")],
    ),
    Case(
        says="a call that is cut within its name is content",
        text='Hm. <tool_call>\n{"name": "ad',
        events=[Said('Hm. <tool_call>\n{"name": "ad')],
    ),
    Case(
        says="a call that is cut within its arguments has a part of them",
        text='<tool_call>\n{"name": "add", "arguments": {"a": [1, "x\\"',
        events=call("add", '{"a": [1, "x\\"'),
    ),
    Case(
        says="a call that is cut before its arguments has none",
        text='<tool_call>\n{"name": "add", "argum',
        events=[CallBegun("add")],
    ),
    Case(
        says="an object that is not closed ends with its tag",
        text='<tool_call>{"name": "add", "arguments": {"a": 1}\n</tool_call> So.',
        events=[*call("add", '{"a": 1}'), Said("So.")],
    ),
    Case(
        says="arguments that are not closed end with their tag",
        text='<tool_call>{"name": "add", "arguments": {"a": 1\n</tool_call>',
        events=call("add", '{"a": 1\n'),
    ),
    Case(
        says="arguments before the name, and other keys",
        text=f'<tool_call>{{"id": 7, "arguments": {ADD}, "name": "add", "more": [1, {{}}]}}</tool_call>',
        events=call("add", ADD),
    ),
    Case(
        says="arguments as a string of JSON",
        text=f'<tool_call>{{"name": "add", "arguments": {json.dumps(ADD)}}}</tool_call>',
        events=call("add", ADD),
    ),
    Case(
        says="no arguments",
        text='<tool_call>{"name":"add"}</tool_call><tool_call>{"name": "add", "arguments": null}</tool_call>',
        events=[*call("add", "{}"), *call("add", "{}")],
    ),
    Case(
        says="a brace too many is content",
        text='<tool_call>{"name":"add","arguments":{}}}</tool_call>',
        events=[*call("add", "{}"), Said("}</tool_call>")],
    ),
    Case(
        says="Llama 3 calls twice",
        text=f'{{"name": "add", "parameters": {ADD}}}; '
        f'{{"type": "function", "name": "get_weather", "parameters": {WEATHER}}}',
        calls=LLAMA3,
        events=[*call("add", ADD), *call("get_weather", WEATHER)],
    ),
    Case(
        says="Llama 3 calls after its tag",
        text=f'I look. <|python_tag|>{{"name": "add", "parameters": {ADD}}}',
        calls=LLAMA3,
        events=[Said("I look."), *call("add", ADD)],
    ),
    Case(
        says="Llama 3 answers with JSON of its own",
        text='\n{"answer": {"name": "add"}}\n',
        calls=LLAMA3,
        events=[Said('\n{"answer": {"name": "add"}}\n')],
    ),
    Case(
        says="Llama 3 goes on after a call",
        text=f'{{"name": "add", "parameters": {ADD}}}; and {{"name": "add"}}',
        calls=LLAMA3,
        events=[*call("add", ADD), Said('; and {"name": "add"}')],
    ),
    Case(
        says="Llama 3 writes Python",
        text='<|python_tag|>brave.call(query="x")',
        calls=LLAMA3,
        events=[Said('<|python_tag|>brave.call(query="x")')],
    ),
    Case(
        says="Mistral lists its calls",
        text=f'Well.[TOOL_CALLS] [{{"name": "add", "arguments": {ADD}}}, '
        f'{{"name": "get_weather", "arguments": {WEATHER}, "id": "abc"}}]',
        calls=MISTRAL_LIST,
        events=[Said("Well."), *call("add", ADD), *call("get_weather", WEATHER)],
    ),
    Case(
        says="Mistral names its calls",
        text=f"[TOOL_CALLS]add[ARGS]{ADD}[TOOL_CALLS]get_weather[CALL_ID]abc123DEF[ARGS]{WEATHER}",
        calls=MISTRAL_NAMED,
        events=[*call("add", ADD), *call("get_weather", WEATHER)],
    ),
    Case(
        says="Mistral thinks, and names a call without a tag before its arguments",
        text=f"[THINK]Which one?[/THINK]This one.[TOOL_CALLS]add{ADD}",
        calls=MISTRAL_NAMED,
        reasoning=MISTRAL_THINK,
        events=[Thought("Which one?"), Said("This one."), *call("add", ADD)],
    ),
    Case(
        says="Mistral names an unknown tool",
        text=f"[TOOL_CALLS]remove[ARGS]{ADD}",
        calls=MISTRAL_NAMED,
        events=[Said(f"[TOOL_CALLS]remove[ARGS]{ADD}")],
    ),
    Case(
        says="Mistral is cut within a name",
        text="Hm [TOOL_CALLS]get_wea",
        calls=MISTRAL_NAMED,
        events=[Said("Hm [TOOL_CALLS]get_wea")],
    ),
    Case(
        says="Mistral is cut before its arguments",
        text="[TOOL_CALLS]add[AR",
        calls=MISTRAL_NAMED,
        events=[Said("[TOOL_CALLS]add[AR")],
    ),
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
def test_each_text_means_its_events(case: Case) -> None:
    assert parsed(case, [case.text]) == case.events


@BY_NAME
def test_every_cut_into_two_or_three_and_into_characters_means_the_same(case: Case) -> None:
    length = len(case.text)
    assert parsed(case, list(case.text)) == case.events
    for first in range(length):
        for second in range(first, min(first + 24, length)):
            assert parsed(case, cut(case.text, [first, second])) == case.events


@BY_NAME
def test_every_beginning_means_the_same_however_it_is_cut(case: Case) -> None:
    """A beginning is what `max_tokens` leaves of an output."""
    for end in range(len(case.text)):
        part = case.text[:end]
        assert parsed(case, list(part)) == parsed(case, [part])


ALPHABET = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    *(
        "<|python_tag|>",
        '"name"',
        '"add"',
        '"arguments"',
        '"parameters"',
        "add",
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
    ),
    *(" ", "\n", ";", '"', "\\", "<", "1", "ü", "🌧", '"name": "add", "arguments": ', "null"),
]
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
