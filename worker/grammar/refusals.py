"""Refusals: why a grammar is refused, in our own words, from the library's text.

The library's text never leaves this process, because it quotes what the client wrote. Only the names of a schema's
keywords are repeated. Pure.
"""

import json
import re
from collections.abc import Iterable

from blockyard.worker.grammar.grammar import Grammar, GrammarError
from blockyard.worker.grammar.schema import keys_of
from blockyard.worker.grammar.tool_calls import ToolCalls

MAX_NAMED_KEYWORDS = 5
TOO_COMPLEX = "the grammar is too complex to be followed"
NOTHING_FOLLOWS = "no output can follow the grammar: it contradicts itself, or never ends"

_KEYWORD = re.compile(r"[A-Za-z$][A-Za-z0-9$]{0,40}")
_UNSUPPORTED_KEYWORDS = re.compile(r"Unimplemented keys: (\[.*\])", re.DOTALL)
_QUOTED = re.compile(r'"([^"\\]*)"')
_BAD_VALUE = re.compile(r"(?!schema )([\w$]+) must be |(?:Expected [^']* for|Value for) '([^']+)'")

_EXPRESSION_REASONS = {
    "look-around, including": "not supported: look-ahead and look-behind",
    "lookarounds not supported yet": r"not supported: \b, \B, and ^ or $ anywhere but at the ends",
    "backreferences are not supported": "not supported: references back to a group",
    "unclosed group": "it is not valid, a group is not closed",
    "unopened group": "it is not valid, a group is closed that was not opened",
    "unclosed character class": "it is not valid, a character class is not closed",
    "unrecognized escape sequence": "it is not valid, an escape is unknown",
    "repetition operator missing expression": "it is not valid, there is nothing to repeat",
    "regex parse error": "it is not valid",
}
"""Reasons by a part of the library's text, the more exact first."""
_SCHEMA_REASONS = {
    "oneOf constraints are not supported": "not supported: oneOf with parts that may overlap; anyOf is",
    "Pointer '": "a $ref points nowhere",
    "Anchor '": "a $ref points nowhere",
    "Resource '": "a $ref or $schema names another document, and none is fetched",
    "Invalid type: ": "it is not valid, see type",
    "invalid multiple of": "it is not valid, see multipleOf",
    "schema must be ": "it is not valid, a schema must be an object, true or false",
    "Unsatisfiable schema": "it contradicts itself, so that no output can follow it",
}
"""Reasons by the beginning of the library's text."""
_TOO_MUCH = ("schema too large", "grammar size (number of symbols) too big", "fuel exhausted")


def refused(grammar: Grammar, library_text: str = "") -> GrammarError:
    """Return the error for a grammar that cannot be compiled. Without a known text the reason stays general."""
    if any(part in library_text for part in _TOO_MUCH):
        return GrammarError(TOO_COMPLEX)
    reason = _reason(grammar, library_text) or "it is not valid, or uses what is not supported"
    return GrammarError(f"{_SUBJECTS[grammar.kind]} cannot be compiled: {reason}")


def stuck(library_text: str) -> GrammarError:
    """Return the error for a grammar that was compiled, but has no next token."""
    return GrammarError(NOTHING_FOLLOWS if library_text.startswith("NoExtensionBias") else TOO_COMPLEX)


_SUBJECTS = {
    "json_schema": "the JSON schema",
    "regex": "the regular expression",
    "json_object": "the grammar of JSON objects",
    "tool_calls": "a tool's schema",
}


def _reason(grammar: Grammar, text: str) -> str | None:
    match grammar.kind:
        case "regex":
            return _of_expression(text)
        case "json_schema":
            return _of_schema(json.loads(grammar.source), text)
        case "json_object":
            return None
        case "tool_calls":
            calls = ToolCalls.from_source(grammar.source)
            schemas = [json.loads(tool.schema) for tool in calls.tools]
            schemas += [json.loads(calls.text_schema)] if calls.text_schema else []
            _, _, about_schema = text.partition("failed to compile JSON schema: ")
            return "false allows no output" if False in schemas else _of_schema(schemas, about_schema)


def _of_expression(text: str) -> str | None:
    return next((reason for part, reason in _EXPRESSION_REASONS.items() if part in text), None)


def _of_schema(schema: object, text: str) -> str | None:
    if schema is False:
        return "false allows no output"
    for start, reason in _SCHEMA_REASONS.items():
        if text.startswith(start):
            return reason
    if unsupported := _UNSUPPORTED_KEYWORDS.match(text):
        unsupported_names = _keywords(_QUOTED.findall(unsupported[1]), schema)
        return f"not supported: {unsupported_names}" if unsupported_names else None
    if bad_value := _BAD_VALUE.match(text):
        bad_names = _keywords(bad_value.groups(), schema)
        return f"it is not valid, see {bad_names}" if bad_names else "it is not valid"
    if text.startswith(("regex parse error", "lookarounds not supported")):
        return f"of a pattern in it, {_of_expression(text)}"
    return None


def _keywords(names: Iterable[object], schema: object) -> str:
    """Return those names that look like keywords and are keys of the schema."""
    keys = keys_of(schema)
    fit = [name for name in names if isinstance(name, str) and name in keys and _KEYWORD.fullmatch(name)]
    return ", ".join(fit[:MAX_NAMED_KEYWORDS])
