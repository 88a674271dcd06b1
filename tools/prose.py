"""Checks docstrings, comments and documents for plain sentences: `python -m tools.prose [PATH ...]`.

A docstring must not begin with a word of FRAGMENTS, and a sentence has at most MAX_WORDS words. Code, tables, links and
headings are not read. Does not own style beyond these two rules, which a program can check.
"""

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_WORDS = 29
FRAGMENTS = frozenset(
    {"of", "that", "those", "who", "whose", "what", "for", "by", "as", "which", "nobody", "everybody"}
)
"""First words of a docstring that is a fragment or a riddle."""
LEFT_OUT = ("bench/reports/", "proto/v1/", "deploy/demo_model/checkpoint/")
"""Reports of what was measured, generated code, and the history of changes."""
NOT_YET: tuple[str, ...] = ()
"""Prefixes of paths that have not been gone through."""
_WORD = re.compile(r"[A-Za-z][\w'-]*")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]*_`]*\s+(?=[A-Z\"'(`*_\d-])")
_CODE = re.compile(r"``.+?``|`[^`]+`")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_LIST_ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence or docstring that breaks a rule."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def long_sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text with more than MAX_WORDS words. A blank line or a list item ends a sentence."""
    for paragraph in _paragraphs(text):
        plain = _LINK.sub(r"\1", _CODE.sub("Code", paragraph))
        for sentence in _SENTENCE_END.split(plain):
            if len(_WORD.findall(sentence)) > MAX_WORDS:
                yield " ".join(sentence.split())


def _paragraphs(text: str) -> Iterator[str]:
    lines: list[str] = []
    is_code = False
    for line in [*text.splitlines(), ""]:
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        is_end = not line.strip() or is_fence or is_code or line.lstrip().startswith(("|", "#", ">>>", "<"))
        if (is_end or _LIST_ITEM.match(line)) and lines:
            yield "\n".join(lines)
            lines = []
        if not is_end:
            lines.append(_LIST_ITEM.sub("", line, count=1))


def in_source(path: str, source: str) -> Iterator[Finding]:
    """Yield what is wrong with the docstrings and comments of a Python file."""
    for line, text, is_docstring in [*_docstrings(source), *_comments(source)]:
        first = text.split(maxsplit=1)[0].strip("`*(,.:;") if text.strip() else ""
        if is_docstring and first.lower() in FRAGMENTS:
            yield Finding(path, line, f"the docstring begins with {first!r}: begin with a verb or a name")
        for sentence in long_sentences(text):
            words = len(_WORD.findall(sentence))
            yield Finding(path, line, f"a sentence of {words} words, at most {MAX_WORDS}: {sentence[:60]}...")


def _docstrings(source: str) -> Iterator[tuple[int, str, bool]]:
    for node in ast.walk(ast.parse(source)):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text, True


def _comments(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield runs of comment lines as one text each. A comment behind code is a text by itself."""
    first, last, lines = 0, -1, list[str]()
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("#!", "# noqa", "# type:")):
            continue
        row, text = token.start[0], token.string.lstrip("#").strip()
        is_alone = not token.line[: token.start[1]].strip()
        if lines and not (row == last + 1 and is_alone):
            yield first, "\n".join(lines), False
            lines = []
        first = first if lines else row
        last = row if is_alone else -1
        lines.append(text)
    if lines:
        yield first, "\n".join(lines), False


def in_document(path: str, text: str) -> Iterator[Finding]:
    """Yield the long sentences of a Markdown file, each with the first line that has its first words, or line 1."""
    for sentence in long_sentences(text):
        start = " ".join(sentence.split()[:4]).split("Code")[0]
        line = next(
            (row for row, content in enumerate(text.splitlines(), 1) if start and start in content), 1
        )
        words = len(_WORD.findall(sentence))
        yield Finding(path, line, f"a sentence of {words} words, at most {MAX_WORDS}: {sentence[:60]}...")


def findings(paths: Sequence[str]) -> Iterator[Finding]:
    """Yield what is wrong with the files at these paths, which are relative to the project's root."""
    for path in paths:
        text = (ROOT / path).read_text(encoding="utf-8")
        yield from in_source(path, text) if path.endswith(".py") else in_document(path, text)


def checked_paths(prefixes: Sequence[str] = ()) -> list[str]:
    """Return the paths of Python and Markdown files that git does not ignore, without LEFT_OUT. Without prefixes,
    NOT_YET is left out too. With them, only paths that begin with one are returned."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [
        path
        for path in listed.stdout.splitlines()
        if path.endswith((".py", ".md"))
        and not path.startswith(LEFT_OUT)
        and (path.startswith(tuple(prefixes)) if prefixes else not path.startswith(NOT_YET))
        and (ROOT / path).is_file()
    ]


def main() -> None:
    found = list(findings(checked_paths(sys.argv[1:])))
    print(*found, sep="\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
