"""A list of choices as a regular expression: it matches these texts only, in Python and in the engine."""

import re
import string
from pathlib import Path

import pytest
from blockyard.router.openai.requests.structures import given_structure
from blockyard.worker.grammar.compiled import CompiledGrammar
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.worker.grammars import bytes_source, draw_output, regex, text_of

HARD = [
    *string.punctuation,
    *(
        "a b",
        "a\nb",
        "a\tb",
        "a\x00b",
        "naïve 😀",
        "<b>",
        "</b>",
        r"\d",
        r"\n",
        "a/b",
        "^$",
        "(?i)a",
        "[a-b]",
    ),
]


def expression(choices: list[str]) -> str:
    structure = given_structure({"guided_choice": choices})
    assert structure is not None
    return structure.regex


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8), st.text(max_size=8))
def test_a_choice_is_matched_exactly(choices: list[str], other: str) -> None:
    matched = re.compile(expression(choices))
    assert all(matched.fullmatch(choice) for choice in choices)
    assert bool(matched.fullmatch(other)) is (other in choices)


@pytest.mark.parametrize("choices", [HARD, ["yes", "no", "yes, but"]], ids=["hard", "prefixes"])
def test_the_engine_draws_nothing_but_a_choice(tmp_path: Path, choices: list[str]) -> None:
    source = bytes_source(tmp_path)
    compiled = CompiledGrammar(regex(expression(choices)), source.load())
    drawn = set()
    for seed in range(60):
        output = draw_output(compiled, source, seed)
        assert output is not None
        drawn.add(text_of(source, output))
    assert drawn <= set(choices)
    assert len(drawn) > min(20, len(choices) // 2)


@pytest.mark.parametrize("choice", HARD)
def test_the_engine_can_write_each_choice(tmp_path: Path, choice: str) -> None:
    source = bytes_source(tmp_path)
    compiled = CompiledGrammar(regex(expression([choice])), source.load())
    output = draw_output(compiled, source, 1)
    assert output is not None
    assert text_of(source, output) == choice
