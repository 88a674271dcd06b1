"""Requested structures: which ones are accepted, and that every output drawn under the masks matches its structure."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
from blockyard.proto.limits import MAX_REGEX_BYTES, MAX_SCHEMA_DEPTH, MAX_STRUCTURED_BYTES
from blockyard.proto.v1.inference_pb2 import StructuredOutput
from blockyard.worker.grammar.compiled import CompiledGrammar
from blockyard.worker.grammar.grammar import Grammar, GrammarError, grammar_of
from blockyard.worker.grammar.refusals import refused
from blockyard.worker.grammar.schema import FORMATS, prepared

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


def problem_of(grammar: Grammar) -> str:
    with pytest.raises(GrammarError) as refused:
        CompiledGrammar(grammar, demo_source().load()).try_out()
    return str(refused.value)


SMALL = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["tea", "rye"]}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
RUN_OF_SPACE = re.compile(r"\s\s")


def test_an_output_is_not_drowned_in_whitespace() -> None:
    """Names here hold no space of their own: all that is seen stands between the parts."""
    names = {"name": {"type": "string", "pattern": "^[a-z]{1,10}$"}}
    compiled = CompiledGrammar(
        schema({**SMALL, "properties": {**SMALL["properties"], **names}}),  # type: ignore[dict-item]
        demo_source().load(),
    )
    outputs = [draw_output(compiled, demo_source(), seed, max_tokens=100) for seed in range(20)]
    texts = [text_of(demo_source(), output) for output in outputs if output is not None]
    assert len(texts) == len(outputs)
    assert not any(RUN_OF_SPACE.search(text) for text in texts), texts
    assert any(" " in text or "\n" in text for text in texts)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"type": "array", "uniqueItems": True}, "not supported: uniqueItems"),
        ({"if": {}, "then": {}, "x-guidance": {"lenient": True}}, "not supported: if, then"),
        ({"not": {"type": "string"}}, "not supported: not"),
        (
            {"oneOf": [{"type": "integer"}, {"type": "number"}], "x-guidance": {"coerce_one_of": True}},
            "not supported: oneOf with parts that may overlap; anyOf is",
        ),
        (
            {"type": "string", "pattern": "(?=secret)"},
            "of a pattern in it, not supported: look-ahead and look-behind",
        ),
        (
            {"patternProperties": {r"\bsecret": {}}},
            r"of a pattern in it, not supported: \b, \B, and ^ or $ anywhere but at the ends",
        ),
        ({"$ref": "#/secret"}, "a $ref points nowhere"),
        ({"$ref": "#secret"}, "a $ref points nowhere"),
        (
            {"$ref": "http://127.0.0.1:1/secret"},
            "a $ref or $schema names another document, and none is fetched",
        ),
        ({"type": "secret"}, "it is not valid, see type"),
        ({"type": "string", "minLength": "secret"}, "it is not valid, see minLength"),
        ({"required": "secret"}, "it is not valid, see required"),
        ({"enum": "secret"}, "it is not valid, see enum"),
        ({"items": "secret"}, "it is not valid, a schema must be an object, true or false"),
        (
            {"allOf": [{"type": "string"}, {"const": 1}]},
            "it contradicts itself, so that no output can follow it",
        ),
        (False, "false allows no output"),
    ],
)
def test_a_schema_is_refused_with_a_reason_that_repeats_keywords_alone(wanted: object, reason: str) -> None:
    assert problem_of(schema(wanted)) == f"the JSON schema cannot be compiled: {reason}"


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("(secret", "it is not valid, a group is not closed"),
        ("[secret", "it is not valid, a character class is not closed"),
        ("secret)", "it is not valid, a group is closed that was not opened"),
        (r"secret\q", "it is not valid, an escape is unknown"),
        ("*secret", "it is not valid, there is nothing to repeat"),
        ("s{5,2}", "it is not valid"),
        ("(?=secret)s", "not supported: look-ahead and look-behind"),
        (r"\bsecret", r"not supported: \b, \B, and ^ or $ anywhere but at the ends"),
        (r"(secret)\1", "not supported: references back to a group"),
    ],
)
def test_an_expression_is_refused_with_a_reason_that_quotes_nothing(expression: str, reason: str) -> None:
    assert problem_of(regex(expression)) == f"the regular expression cannot be compiled: {reason}"


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (schema({"$ref": "#"}), "no output can follow"),
        (regex("[a&&b]"), "no output can follow"),
        (regex("(((a{100}){100}){100}){100}"), "too complex"),
        (schema({"properties": {f"p{i}": {} for i in range(1500)}, "type": "object"}), "too complex"),
    ],
    ids=["a loop", "an empty class", "repeated", "wide"],
)
def test_what_contradicts_itself_is_told_from_what_is_too_complex(grammar: Grammar, problem: str) -> None:
    assert problem in problem_of(grammar)


@pytest.mark.parametrize("source", ['{"const": NaN}', '{"const": "\\ud800"}'])
def test_what_is_json_to_python_alone_is_refused(source: str) -> None:
    assert "it is not valid" in problem_of(Grammar(kind="json_schema", source=source))


def test_a_key_that_is_no_keyword_by_its_form_is_never_repeated() -> None:
    key = "my secret"
    told = refused(schema({key: 1, "contains": {}}), f'Unimplemented keys: ["{key}", "contains", "other"]')
    assert str(told) == "the JSON schema cannot be compiled: not supported: contains"
    many = {f"k{i}": 1 for i in range(9)}
    told = refused(schema(many), f"Unimplemented keys: {json.dumps(list(many))}")
    assert str(told).endswith("not supported: k0, k1, k2, k3, k4")


def test_what_means_nothing_in_a_schema_does_not_refuse_it() -> None:
    noted = {"type": "string", "format": "licence-plate", "uniqueItems": False}
    assert prepared({"properties": {"format": noted, "uniqueItems": False}, "items": [noted]}) == {
        "properties": {"format": {"type": "string"}, "uniqueItems": False},
        "items": [{"type": "string"}],
    }
    kept = {"enum": [{"format": "x", "uniqueItems": False}], "uniqueItems": True, "format": "date"}
    assert prepared(kept) == kept
    CompiledGrammar(schema(noted), demo_source().load()).try_out()


def test_the_formats_that_are_kept_are_those_the_library_follows() -> None:
    for name in FORMATS:
        CompiledGrammar(schema({"type": "string", "format": name}), demo_source().load()).try_out()


def test_true_allows_any_value() -> None:
    compiled = CompiledGrammar(schema(True), demo_source().load())
    outputs = [draw_output(compiled, demo_source(), seed) for seed in range(12)]
    values = [json.loads(text_of(demo_source(), output)) for output in outputs if output is not None]
    assert len({type(value) for value in values}) > 2


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
        ("json_schema", json.dumps({"const": "ä" * MAX_STRUCTURED_BYTES}), "more than 65536 bytes"),
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
