"""What may be asked for, and that every output drawn under the masks is what was asked for."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
from blockyard.proto.v1.inference_pb2 import StructuredOutput
from blockyard.worker.grammar.compiled import CompiledGrammar
from blockyard.worker.grammar.grammar import (
    MAX_REGEX_BYTES,
    MAX_SCHEMA_DEPTH,
    MAX_SOURCE_BYTES,
    Grammar,
    GrammarError,
    grammar_of,
)

from .grammars import PERSON, bytes_source, demo_source, draw_output, regex, schema, text_of

EXPRESSIONS = [
    r"([0-9]{3}-)?[a-f]+(x|y/z)?",
    r"^(ja|nein|ä\"b\n)$",
    r"(?i:ab){1,3}\.\\",
    r"[\w-]{2}\s?\d\\d/",
]
SCHEMAS: list[object] = [
    PERSON,
    {"enum": ["a", 1, None, {"b": [True]}]},
    {"type": "array", "items": {"type": ["boolean", "integer"]}, "minItems": 2, "maxItems": 4},
    {"oneOf": [{"type": "integer", "multipleOf": 5}, {"const": "none"}]},
]


@pytest.fixture(params=["demo", "padded", "bytes"])
def source(request: pytest.FixtureRequest, tmp_path: Path):  # type: ignore[no-untyped-def]
    match request.param:
        case "demo":
            return demo_source()
        case "padded":
            return demo_source(vocab_size=4133)
        case _:
            return bytes_source(tmp_path)


@pytest.mark.parametrize("wanted", SCHEMAS, ids=["person", "enum", "array", "one of"])
def test_every_output_is_json_that_the_schema_accepts(source, wanted) -> None:  # type: ignore[no-untyped-def]
    compiled = CompiledGrammar(schema(wanted), source.load())
    for seed in range(5):
        output = draw_output(compiled, source, seed)
        assert output is not None
        jsonschema.validate(json.loads(text_of(source, output)), wanted)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_output_is_matched_by_the_whole_expression(source, expression) -> None:  # type: ignore[no-untyped-def]
    compiled = CompiledGrammar(regex(expression), source.load())
    texts = set()
    for seed in range(6):
        output = draw_output(compiled, source, seed)
        assert output is not None
        texts.add(text_of(source, output))
    assert all(re.fullmatch(expression, text) for text in texts), texts
    assert len(texts) > 1


def test_any_json_object_is_a_json_object(source) -> None:  # type: ignore[no-untyped-def]
    compiled = CompiledGrammar(Grammar(kind="json_object"), source.load())
    outputs = [draw_output(compiled, source, seed) for seed in range(8)]
    values = [json.loads(text_of(source, output)) for output in outputs if output is not None]
    assert values
    assert all(isinstance(value, dict) for value in values)


@pytest.mark.parametrize(
    "grammar",
    [
        schema({"not": {"type": "string"}}),
        schema({"type": "array", "uniqueItems": True}),
        schema({"if": {"type": "string"}, "then": {"minLength": 3}, "x-guidance": {"lenient": True}}),
        schema({"oneOf": [{"type": "integer"}, {"type": "number"}], "x-guidance": {"coerce_one_of": True}}),
        schema({"$ref": "http://127.0.0.1:1/other.json"}),
        schema(False),
        Grammar(kind="json_schema", source='{"const": NaN}'),
        Grammar(kind="json_schema", source='{"const": "\\ud800"}'),
        regex("(a"),
        regex(r"(?=a)a"),
        regex(r"(a)\1"),
        regex(r"\ba"),
    ],
    ids=lambda grammar: grammar.source,
)
def test_what_cannot_be_followed_exactly_is_refused_without_quoting_it(grammar: Grammar) -> None:
    with pytest.raises(GrammarError, match="cannot be compiled: it is wrong, or uses what is not supported"):
        CompiledGrammar(grammar, demo_source().load())


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("json_schema", "[" * 60_000, "nested too deeply"),
        (
            "json_schema",
            '{"a":' * (MAX_SCHEMA_DEPTH + 1) + "{}" + "}" * (MAX_SCHEMA_DEPTH + 1),
            "nested deeper than 100",
        ),
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", "[]", "must be an object, true or false"),
        ("json_schema", json.dumps({"const": "ä" * MAX_SOURCE_BYTES}), "more than 65536 bytes"),
        ("regex", "", "1 to 8192 bytes"),
        ("regex", "ä" * (MAX_REGEX_BYTES // 2 + 1), "1 to 8192 bytes"),
    ],
    ids=lambda value: value[:12],
)
def test_size_depth_and_form_are_checked_before_the_library_sees_it(kind, text, problem) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(GrammarError, match=problem):
        Grammar(kind=kind, source=text)


def test_a_grammar_is_read_from_its_message() -> None:
    assert grammar_of(StructuredOutput()) is None
    assert grammar_of(StructuredOutput(json_object=True)) == Grammar(kind="json_object")
    assert grammar_of(StructuredOutput(regex="a+")) == regex("a+")
    assert grammar_of(StructuredOutput(json_schema="{}")) == schema({})


def test_a_model_that_cannot_end_an_output_or_has_no_tokenizer_is_refused(tmp_path: Path) -> None:
    source = demo_source()
    with pytest.raises(ValueError, match="without end-of-sequence tokens"):
        type(source)(file=source.file, vocab_size=4096, eos_token_ids=()).load()
    with pytest.raises(ValueError, match=r"needs the model's tokenizer\.json"):
        type(source)(file=tmp_path / "tokenizer.json", vocab_size=4096, eos_token_ids=(2,)).load()
