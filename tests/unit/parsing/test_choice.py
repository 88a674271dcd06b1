"""The choice of a format by chat template and tokens, and that each format reads what its own grammar forces."""

import json

import pytest
from blockyard.proto.text import load_tokenizer
from blockyard.router.parsing.choice import answer_format, chosen_format
from blockyard.router.parsing.events import Arguments, CallBegun, merged
from blockyard.router.parsing.formats import (
    HERMES,
    LLAMA3,
    MISTRAL_LIST,
    MISTRAL_NAMED,
    MISTRAL_THINK,
    NO_END,
    NO_FORMAT,
    THINK,
    AnswerFormat,
)
from blockyard.router.parsing.reading import Reading

from tests.unit.router.rig import MODEL

QWEN3 = (
    "{%- if tools %}{{- '<tools>' }}{%- endif %}{%- if '</think>' in content %}{%- endif %}"
    '{{- \'<tool_call>\\n{"name": "\' }}{%- if enable_thinking is defined and enable_thinking is false %}'
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)
QWEN25 = "{%- if tools %}{{- '<tool_call>\\n{\\\"name\\\": <function-name>' }}{%- endif %}"
CODER = "{%- if tools %}{{- '<tool_call>\\n<function=example>\\n<parameter=a>' }}{%- endif %}"
LLAMA31 = (
    "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
    "{{- '{\"name\": \"' + tool_call.name + '\", ' }}{{- '\"parameters\": ' }}"
)
MISTRAL7 = "{%- if tools is not none %}[AVAILABLE_TOOLS]{%- endif %}[TOOL_CALLS]["
MISTRAL11 = "{%- if tools %}[AVAILABLE_TOOLS]{%- endif %}[TOOL_CALLS]{{ name }}[ARGS]"
MAGISTRAL = MISTRAL11 + "[THINK]{{ thinking }}[/THINK]"
CALL_TOKENS = {"<tool_call>": 10, "</tool_call>": 11}
THINK_TOKENS = {"<think>": 12, "</think>": 13}


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        ("{{ messages }}", CALL_TOKENS, NO_FORMAT),
        (
            QWEN3,
            {**CALL_TOKENS, **THINK_TOKENS, "<|im_end|>": 1},
            AnswerFormat(
                tools=HERMES,
                reasoning=THINK,
                tokens={**CALL_TOKENS, **THINK_TOKENS},
                variables=frozenset({"enable_thinking"}),
            ),
        ),
        (QWEN25, {}, AnswerFormat(tools=HERMES)),
        (CODER, CALL_TOKENS, NO_FORMAT),
        (LLAMA31, {"<|python_tag|>": 7}, AnswerFormat(tools=LLAMA3, tokens={"<|python_tag|>": 7})),
        (LLAMA31, {}, NO_FORMAT),
        (MISTRAL7, {"[TOOL_CALLS]": 5}, AnswerFormat(tools=MISTRAL_LIST, tokens={"[TOOL_CALLS]": 5})),
        (
            MISTRAL11,
            {"[TOOL_CALLS]": 5, "[ARGS]": 6},
            AnswerFormat(tools=MISTRAL_NAMED, tokens={"[TOOL_CALLS]": 5, "[ARGS]": 6}),
        ),
        (MAGISTRAL, {}, AnswerFormat(tools=MISTRAL_NAMED, reasoning=MISTRAL_THINK)),
    ],
)
def test_a_template_shows_its_format(template: str, tokens: dict[str, int], expected: AnswerFormat) -> None:
    assert chosen_format(chat_template=template, added_tokens=tokens) == expected


def test_a_response_template_comes_first_and_a_setting_before_it() -> None:
    own = {"start_anchor": "<|im_start|>", "fields": {"content": {"close": "<|im_end|>"}}}
    tokens = {"<|im_start|>": 1, "<|im_end|>": 2, "<tool_call>": 3}
    found = chosen_format(chat_template=QWEN3, added_tokens=tokens, response_template=own)
    assert (found.template, found.shown_tokens, found.reads_tools) == (own, frozenset({1, 2}), True)
    forced = chosen_format(
        chat_template=QWEN3,
        added_tokens={},
        response_template=own,
        tool_parser="mistral",
        reasoning_parser="none",
    )
    assert (forced.tools, forced.template, forced.reasoning) == (MISTRAL_LIST, None, None)


def test_the_demo_models_format_is_hermes() -> None:
    assert answer_format(load_tokenizer(MODEL)) == AnswerFormat(tools=HERMES)
    with pytest.raises(ValueError, match="no response template"):
        answer_format(load_tokenizer(MODEL), "template")


@pytest.mark.parametrize("calls", [HERMES, LLAMA3, MISTRAL_LIST, MISTRAL_NAMED])
def test_each_format_reads_the_calls_that_its_grammar_forces(calls) -> None:  # type: ignore[no-untyped-def]
    model = AnswerFormat(tools=calls)
    grammar = model.grammar({"add": "{}", "now": "{}"}, allows_many=True, allows_text=False)
    assert grammar is not None
    said = [
        tool.before + arguments + tool.after
        for tool, arguments in zip(grammar.tools, ('{"a":1}', "{}"), strict=True)
    ]
    text = grammar.begin + grammar.separator.join(said) + grammar.end
    parser = Reading(format=model, tools={"add": None, "now": None}, reads_reasoning=False).parser(NO_END)
    events = merged([*parser.push(text), *parser.finish()])
    assert events == [CallBegun("add"), Arguments('{"a":1}'), CallBegun("now"), Arguments("{}")]
    assert all(json.loads(event.text) is not None for event in events if isinstance(event, Arguments))
