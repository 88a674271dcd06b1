"""The linter of sentences finds fragments and long sentences, and reads neither code nor tables."""

import pytest

from tools.prose import MAX_WORDS, NOT_YET, checked_paths, in_document, in_source

LONG = " ".join(["Word", *["word"] * MAX_WORDS])
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


def test_a_comment_of_several_lines_is_one_text() -> None:
    half = " ".join(["Word"] * (MAX_WORDS // 2 + 1))
    assert len(list(in_source("x.py", f"# {half}\n# {half}.\n"))) == 1
    assert not list(in_source("x.py", f"# {half}.\n# {half}.\n")), "a full stop ends a sentence"


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


def test_nothing_is_left_out_and_reports_are_not_read() -> None:
    assert NOT_YET == ()
    assert not [path for path in checked_paths() if path.startswith("bench/reports/")]
    assert {"README.md", "worker/engine.py", "tests/unit/docs/test_prose.py"} <= set(checked_paths())
