"""The linter of sentences finds fragments and long sentences, and reads neither code nor tables."""

import pytest

from tools.prose import MAX_WORDS, in_document, in_source

LONG = " ".join(["Word", *["word"] * MAX_WORDS])
HALF = " ".join(["Word"] * (MAX_WORDS // 2 + 1))
SHORT = " ".join(["Word", *["word"] * (MAX_WORDS - 1)])


@pytest.mark.parametrize("word", ["Of", "What", "Those", "By"])
def test_a_docstring_that_begins_with_a_fragment_is_found(word: str) -> None:
    (finding,) = in_source("x.py", f'def f():\n    """{word} the blocks."""\n')
    assert (finding.line, repr(word) in finding.message) == (2, True)


@pytest.mark.parametrize(
    "source", [f'"""Begin. {LONG}."""\n', f"# {LONG}.\n", f'class A:\n    b: int\n    """Bound: {LONG}."""\n']
)
def test_a_long_sentence_is_found_in_docstrings_and_comments(source: str) -> None:
    assert len(list(in_source("x.py", source))) == 1
    assert not list(in_source("x.py", f"# {HALF}.\n# {HALF}.\n")), "a full stop ends a sentence"


@pytest.mark.parametrize(
    "text",
    [
        f"{SHORT}.",
        f"{SHORT}. {SHORT}.",
        f"```\n{LONG}\n```",
        f"| {LONG} | {LONG} |",
        f"- {SHORT}\n- {SHORT}",
        f"`{LONG}` is code.",
        f"[a link](https://example.com/{LONG.replace(' ', '/')})",
    ],
)
def test_what_is_no_long_sentence_of_a_document_is_left_alone(text: str) -> None:
    assert not list(in_document("x.md", text))


def test_a_long_sentence_of_a_document_is_found_on_its_line() -> None:
    (finding,) = in_document("x.md", f"# Heading\n\nA first one. Another {LONG}.\n")
    assert finding.line == 3
