"""Guard: keeps a client's text from becoming control tokens, whatever a chat template does with it. Pure.

A control token can only arise with the characters at its ends, or inside of ends that the template writes around a
whole text. While the template renders, *twins* stand for those characters in the client's texts: private characters of
the same number. So the rendered text shows which control
tokens the template wrote, and where the client's text is. What the template drops is gone, and nothing is refused.

Owns which tokens are control tokens: the special tokens, and the tags that the chat template writes. Does not own
rendering or encoding (encoder.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from blockyard.router.parsing.choice import answer_format

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PRIVATE = range(0xF0000, 0xFFFFE)
"""Code points that have no meaning (Unicode's plane 15)."""
_ESCAPE = "\\ud"
"""Begin of a private character in JSON of ASCII alone."""


STRUCTURE = frozenset(
    ("arguments", "description", "function", "id", "name", "parameters", "properties", "required", "type")
)
"""Keys that templates look for."""


class RenderedPart(NamedTuple):
    """A part of a rendered chat: a control token of the template, or the text between two of them."""

    text: str
    is_control: bool
    has_client: bool
    """Whether it has characters of the client that could be of a control token."""


class Guard:
    """The control tokens of one model, and what in a text could become one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokens = _control_tokens(tokenizer)
        """Texts of the control tokens by their ids."""
        self.id_of = {text: token_id for token_id, text in self.tokens.items()}
        ends = {text.strip()[at] for text in self.id_of for at in (0, -1)}
        self.ends = frozenset(character for character in ends if not character.isalnum())
        """First and last characters of control tokens, such as < and >. A text without them cannot complete one."""
        self.words = _words([text for text in self.id_of if text[0].isalnum() and text[-1].isalnum()])
        self.cores = frozenset(_cores(self.id_of)) - STRUCTURE
        """Control tokens without their ends, such as "|x|" and "x" of "<|x|>". A template may write ends around a
        client's key or name."""
        self.written = re.compile(_any_of(self.id_of))
        self.tags = re.compile(_any_of(_own_tags(tokenizer)))
        """The model's own tags for reasoning and calls. In an answer they are what the template reads."""
        self.cut = _cut(text for text in self.id_of if len(text) > 1)
        """Places in control tokens, such as the one behind "<" in "<|x|>", whose sides are no control tokens."""
        self._alphabet = "".join(sorted(set("".join(self.id_of))))

    def twins(self, rendered: str) -> Twins:
        """Return twins that the rendered chat does not have."""
        taken = {character for character in set(rendered) if ord(character) in _PRIVATE}
        size = len(self._alphabet)
        starts = range(_PRIVATE.start, _PRIVATE.stop - size, max(size, 1))
        spans = (range(start, start + size) for start in starts)
        free = (span for span in spans if taken.isdisjoint(map(chr, span)))
        # Where none is free, some characters of that client are taken for others of its own.
        twins = "".join(map(chr, next(free, range(_PRIVATE.start, _PRIVATE.start + size))))
        return Twins(self, dict(zip(self._alphabet, twins, strict=True)))


class Twins:
    """Private characters for one chat, each in place of one character."""

    def __init__(self, guard: Guard, twins: dict[str, str]) -> None:
        self._guard = guard
        self._twins = twins
        self._of_ends = {ord(character): twins[character] for character in guard.ends}
        self._back = {ord(twin): character for character, twin in twins.items()}

    def of_core(self, text: str) -> str:
        """Return a client's text with twins, so that it becomes none inside of ends that a template writes either."""
        if text.strip() in self._guard.cores:
            return "".join(self._twins.get(character, character) for character in text)
        return self.of_client(text)

    def of_client(self, text: str) -> str:
        """Return a client's text with twins, so that nothing in it can become a control token."""
        if self._guard.words is not None:
            text = self._guard.words.sub(lambda found: "".join(map(self._twins.__getitem__, found[0])), text)
        return text if self._guard.ends.isdisjoint(text) else text.translate(self._of_ends)

    def of_answer(self, text: str) -> str:
        """Return the text of an earlier answer with twins. The model's own tags stay."""
        shown: list[str] = []
        at = 0
        for tag in self._guard.tags.finditer(text):
            shown += self.of_client(text[at : tag.start()]), tag[0]
            at = tag.end()
        return "".join((*shown, self.of_client(text[at:])))

    def shown(self, text: str) -> str:
        """Return the text that the twins stand for."""
        if _ESCAPE in text:
            for escape, character in self._escapes.items():
                text = text.replace(escape, character)
        return text.translate(self._back)

    @cached_property
    def _escapes(self) -> dict[str, str]:
        return {json.dumps(twin)[1:-1]: character for character, twin in self._twins.items()}

    def parts(self, rendered: str) -> Iterator[RenderedPart]:
        """Yield the parts of a chat that was rendered with twins."""
        at = 0
        for found in self._guard.written.finditer(rendered):
            yield from self._between(rendered[at : found.start()])
            yield RenderedPart(found[0], is_control=True, has_client=False)
            at = found.end()
        yield from self._between(rendered[at:])

    def _between(self, text: str) -> Iterator[RenderedPart]:
        if text:
            shown = self.shown(text)
            yield RenderedPart(shown, is_control=False, has_client=shown != text)


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    template = str(tokenizer.chat_template or "")
    return {
        token_id: token.content
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if (token.special and token.content.strip()) or (token.content in template and _is_tag(token.content))
    }


def _own_tags(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    known, added = answer_format(tokenizer), tokenizer.added_tokens_decoder
    return known.tags or [text for text, token_id in known.tokens.items() if not added[token_id].special]


def _cores(texts: Iterable[str]) -> Iterator[str]:
    for text in map(str.strip, texts):
        begin, end = 0, len(text)
        while begin < end and not text[begin].isalnum() and not text[end - 1].isalnum():
            begin, end = begin + 1, end - 1
            yield text[begin:end].strip()
        if begin:
            yield text.strip("".join(character for character in text if not character.isalnum()))


def _is_tag(text: str) -> bool:
    """Return whether an added token looks like a mark, such as `<think>`. Others, such as a newline, are ordinary
    writing, which the template has too."""
    first, last = text[:1], text[-1:]
    has_word = any(map(str.isalpha, text))
    return has_word and not any(end.isalnum() or end.isspace() for end in (first, last))


def _words(texts: list[str]) -> re.Pattern[str] | None:
    """Return what finds control tokens that begin and end with a letter, and parts of them at the ends of a text."""
    if not texts:
        return None
    heads = _any_of(text[:at] for text in texts for at in range(1, len(text)))
    tails = _any_of(text[at:] for text in texts for at in range(1, len(text)))
    return re.compile(rf"{_any_of(texts)}|{heads}\Z|\A{tails}")


def _cut(texts: Iterable[str]) -> re.Pattern[str]:
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[0], []).append(text[1:])
    places = (f"(?<={re.escape(first)})(?={_any_of(some)})" for first, some in rests.items())
    return re.compile("|".join(places) or r"(?!)")


def _any_of(texts: Iterable[str]) -> str:
    """Return an expression for the longest of these texts. Texts that begin alike are looked for at once."""
    some = set(texts)
    if len(some) == 1:
        return re.escape(next(iter(some)))
    rests: dict[str, list[str]] = {}
    for text in some - {""}:
        rests.setdefault(text[0], []).append(text[1:])
    longer = "|".join(re.escape(first) + _any_of(rest) for first, rest in sorted(rests.items())) or r"(?!)"
    return f"(?:{longer})?" if "" in some else f"(?:{longer})"
