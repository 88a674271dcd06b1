"""Grammars of tool calls: an output drawn under the masks is calls in the model's format, after text where allowed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from blockyard.proto.v1.inference_pb2 import StructuredOutput, ToolCallGrammar, ToolForm
from blockyard.worker.grammar.compiled import CompiledGrammar, TokenizerSource
from blockyard.worker.grammar.grammar import Grammar, GrammarError, grammar_of

from .grammars import demo_source, draw_output, text_of

SCHEMAS: dict[str, dict[str, Any]] = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": [1, 2]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "look-up": {
        "type": "object",
        "properties": {"key": {"$ref": "#/$defs/key"}},
        "required": ["key"],
        "$defs": {"key": {"type": "string", "maxLength": 3}},
        "additionalProperties": False,
    },
}
TAGS = {"begin": "<tool_call>\n", "separator": "\n</tool_call>\n<tool_call>\n", "end": "\n</tool_call>"}
BARE = {"separator": "; "}
THINKS = {"think_open": "<think>", "think_close": "</think>"}


def grammar(**fields: Any) -> Grammar:
    tools = [
        ToolForm(
            before=json.dumps({"name": name})[:-1] + ', "arguments": ', schema=json.dumps(schema), after="}"
        )
        for name, schema in SCHEMAS.items()
    ]
    made = grammar_of(StructuredOutput(tool_calls=ToolCallGrammar(tools=tools, **fields)))
    assert made is not None
    return made


def source_with(tmp_path: Path, *added: str) -> TokenizerSource:
    """Return the demo's tokenizer with further tokens, from id 4096 on."""
    plain = demo_source()
    content = json.loads(plain.file.read_text())
    for number, text in enumerate(added):
        token = content["added_tokens"][0] | {"id": 4096 + number, "content": text}
        content["added_tokens"].append(token)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content))
    return replace(plain, file=file, vocab_size=4096 + len(added))


def drawn(made: Grammar, source: TokenizerSource, seed: int) -> str:
    output = draw_output(CompiledGrammar(made, source.load()), source, seed)
    assert output is not None
    return text_of(source, output)


def check_call(text: str) -> str:
    """Check one call's JSON, and return its tool's name."""
    call = json.loads(text)
    jsonschema.validate(call["arguments"], SCHEMAS[call["name"]])
    return str(call["name"])


@pytest.mark.parametrize("marks", [(), ("<tool_call>", "</tool_call>")])
def test_calls_alone_are_in_their_tags_and_follow_their_tools_schemas(
    tmp_path: Path, marks: tuple[str, ...]
) -> None:
    source = source_with(tmp_path, *marks)
    tokens = {mark: 4096 + number for number, mark in enumerate(marks)}
    names = set()
    for seed in range(8):
        text = drawn(grammar(**TAGS, tokens=tokens), source, seed)
        assert text.startswith(TAGS["begin"])
        assert text.endswith(TAGS["end"])
        names.add(check_call(text.removeprefix(TAGS["begin"]).removesuffix(TAGS["end"])))
    assert names == SCHEMAS.keys()


@pytest.mark.parametrize("allows_many", [True, False])
def test_several_calls_are_separated_where_the_client_allows_them(allows_many: bool) -> None:
    source, tokenizer = demo_source(), demo_source().load()
    call = '{"name": "add", "arguments": {"a":1,"b":2}}'
    matcher = CompiledGrammar(grammar(**BARE, allows_many=allows_many), source.load()).matcher()
    assert matcher.accept(tokenizer.tokenize_str(call))
    assert matcher.accept(tokenizer.tokenize_str(f"; {call}; {call}")) is allows_many


@pytest.mark.parametrize("form", [TAGS, BARE])
@pytest.mark.parametrize("begins", [True, False])
def test_where_text_is_allowed_a_call_that_begins_is_followed_to_its_end(
    form: dict[str, str], begins: bool
) -> None:
    source = demo_source()
    compiled = CompiledGrammar(grammar(**form, allows_text=True), source.load())
    tokenizer = source.load()
    said = ("" if form is BARE else "Let me see. ") + form.get("begin", "") + '{"name": "add", "arguments": '
    matcher = compiled.matcher()
    assert matcher.accept(tokenizer.tokenize_str(said if begins else "It is four. {")), matcher.error
    assert matcher.accept(tokenizer.tokenize_str('{"a":"x')) is not begins


@pytest.mark.parametrize("spaces", ["", " ", "\n", " \n\t"])
def test_spaces_before_a_bare_call_do_not_free_it_of_its_schema(spaces: str) -> None:
    source, tokenizer = demo_source(), demo_source().load()
    compiled = CompiledGrammar(grammar(**BARE, allows_text=True), source.load())
    begun = compiled.matcher()
    assert begun.accept(tokenizer.tokenize_str(spaces + '{"name": "add", "arguments": ')), begun.error
    assert not begun.accept(tokenizer.tokenize_str('{"a":"x'))
    said = compiled.matcher()
    assert said.accept(tokenizer.tokenize_str(f"{spaces}It is four. {{")), said.error


def test_reasoning_may_come_first_and_must_end_where_the_prompt_began_it() -> None:
    source, tokenizer = demo_source(), demo_source().load()
    for is_thinking, said, fits in [
        (False, f"<think>\nHm. {{</think>\n\n{CALL}", True),
        (False, CALL, True),
        (False, f"Hm.</think>\n\n{CALL}", False),
        (True, f"Hm. <tool</think>\n\n{CALL}", True),
        (True, f"{CALL}</think>{CALL}", True),
    ]:
        compiled = CompiledGrammar(grammar(**TAGS, **THINKS, is_thinking=is_thinking), source.load())
        matcher = compiled.matcher()
        assert matcher.accept([*tokenizer.tokenize_str(said), *source.eos_token_ids]) is fits, said


CALL = '<tool_call>\n{"name": "add", "arguments": {"a":1,"b":2}}\n</tool_call>'


def test_marks_that_are_tokens_are_written_as_tokens_alone(tmp_path: Path) -> None:
    marks = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    source = source_with(tmp_path, *marks)
    tokens = {mark: 4096 + number for number, mark in enumerate(marks)}
    tokenizer = source.load()
    made = grammar(**TAGS, **THINKS, tokens=tokens, allows_text=True)
    for said, fits in [
        (f"<think>\nHm.\n</think>\n\nLook: {CALL}", True),
        ("<think>Hm.</think>Four.", True),
        (f"Four. {CALL}", True),
        (CALL + "More.", False),
        (CALL.replace("add", "remove"), False),
    ]:
        matcher = CompiledGrammar(made, source.load()).matcher()
        assert matcher.accept([*tokenizer.tokenize_str(said), source.eos_token_ids[0]]) is fits, said


def test_a_schema_of_the_text_is_an_alternative_to_calls() -> None:
    source, tokenizer = demo_source(), demo_source().load()
    answer = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "additionalProperties": False}
    made = grammar(**TAGS, allows_text=True, text_schema=json.dumps(answer))
    said_and_fits = {CALL: True, '{"ok":true}': True, "It is ok.": False, f'{{"ok":true}}{CALL}': False}
    for said, fits in said_and_fits.items():
        matcher = CompiledGrammar(made, source.load()).matcher()
        assert matcher.accept([*tokenizer.tokenize_str(said), source.eos_token_ids[0]]) is fits, said


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("false", "allows no output"),
        ('{"type": "object", "unevaluatedItems": false}', "unevaluatedItems"),
        ('{"type": "strnig"}', "see type"),
        ("{", "not valid JSON"),
        ('{"$ref": "https://elsewhere.example/x"}', "none is fetched"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_in_our_own_words(schema: str, says: str) -> None:
    message = ToolCallGrammar(tools=[ToolForm(before="{", schema=schema, after="}")])
    with pytest.raises(GrammarError, match=says):
        CompiledGrammar(
            grammar_of(StructuredOutput(tool_calls=message)) or grammar(), demo_source().load()
        ).try_out()


def test_a_grammar_without_tools_is_refused() -> None:
    with pytest.raises(GrammarError, match="no tool"):
        grammar_of(StructuredOutput(tool_calls=ToolCallGrammar()))
