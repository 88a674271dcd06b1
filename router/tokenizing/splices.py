"""Splices: an answer's own token ids in place of its text in a later prompt, so that its cached blocks are found again.

A model may sample other tokens than the tokenizer makes of the same text. So a prompt with an earlier answer takes the
tokens that were sampled, wherever the text is equal. Pure: the tokenizer is an argument. Does not own how answers are
kept (generation/answer_store.py) or rendered (encoder.py).

A splice changes no text of the prompt, with one exception: a tool call that the chat template spells otherwise than
the model did. If both are the same call, the prompt has the model's spelling (`respelled`).
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

from blockyard.proto.naming.block_hash import TOKEN_BYTES, unpack_tokens
from blockyard.proto.text import REPLACEMENT

ARGUMENT_KEYS = ("arguments", "parameters")
"""Keys under which models and templates write a call's arguments."""
_PLACE = struct.Struct("<Q16s")
_ENTRY = struct.Struct("<24sI")
PLACE_BYTES = _PLACE.size
_CONTEXT_TOKENS = 8
"""Tokens before an answer that are decoded with it. Some tokenizers write a first token without its space."""
_BORDER_CHARACTERS = 16
"""Characters on both sides of a border that show whether the text may be encoded in two parts there."""
_FIRST_TOKENS = 32
"""Tokens of an answer that show whether it is worth decoding whole. A place may have many answers."""
_MOST_STEPS_BACK = 16
_MOST_BRACES = 256
"""Most places in an answer at which a call is looked for."""


class Answer(NamedTuple):
    place: bytes
    """Name of the prompt that it answers: the length and hash of its text."""
    token_ids: list[int]
    """Its tokens as they were sampled."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of the chat: its name, and its arguments in one spelling."""

    name: str
    arguments: str


class Spelling(Protocol):
    """Tokenizer of one model, as far as splices need it."""

    def encode_part(self, text: str, *, is_template: bool, after: int | None) -> list[int]:
        """Return the token ids of a part of a prompt that follows the token `after`. None: it is the prompt's first.

        Only the template's own text may become control tokens. Raises PromptError.
        """

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def control(self, token_ids: Sequence[int]) -> list[int]:
        """Return the control tokens among these, in order."""


class Piece(NamedTuple):
    text: str
    is_template: bool
    """Whether it may contain control tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spliced:
    """A prompt's tokens with those of earlier answers in it."""

    token_ids: list[int]
    plain_control: list[int]
    """The control tokens of the same parts without any splice."""
    num_spliced: int
    """Tokens that come from answers."""


def place_of(text: str) -> bytes:
    """Return the name of a prompt's text. An answer to it begins right behind that text."""
    return next(_places(text, [len(text)]))


def pack_answer(place: bytes, packed_ids: bytes) -> bytes:
    return _ENTRY.pack(place, len(packed_ids) // TOKEN_BYTES) + packed_ids


def unpack_answers(packed: bytes) -> list[Answer]:
    answers: list[Answer] = []
    at = 0
    while at < len(packed):
        place, num_tokens = _ENTRY.unpack_from(packed, at)
        end = at + _ENTRY.size + num_tokens * TOKEN_BYTES
        answers.append(Answer(place, unpack_tokens(packed[at + _ENTRY.size : end])))
        at = end
    return answers


def _places(text: str, ends: Sequence[int]) -> Iterator[bytes]:
    """Yield the names of a text's heads that end at `ends`, in order. The text is hashed once."""
    digest, start = blake2b(digest_size=16), 0
    for end in ends:
        digest.update(text[start:end].encode("utf-8", "surrogatepass"))
        yield _PLACE.pack(end, digest.digest())
        start = end


def placed(text: str, answers: Sequence[Answer]) -> list[tuple[int, list[list[int]]]]:
    """Return the answers to heads of this text: (where they begin, their token ids), the first place first.

    Elsewhere a splice would be useless: blocks behind a different text are different blocks.
    """
    at_place: dict[int, list[Answer]] = {}
    for answer in answers:
        at = _PLACE.unpack(answer.place)[0]
        if at < len(text):
            at_place.setdefault(at, []).append(answer)
    starts = sorted(at_place)
    found = [
        (at, [answer.token_ids for answer in at_place[at] if answer.place == place])
        for at, place in zip(starts, _places(text, starts), strict=True)
    ]
    return [(at, ids) for at, ids in found if ids]


class _Match(NamedTuple):
    """The leading tokens of an answer that a prompt repeats."""

    token_ids: list[int]
    end: int
    """Where their text ends in `text`."""
    text: str
    """The prompt's text, with the answer's spelling of its calls."""


class Splicer:
    """Encodes one prompt with the answers that it repeats. Used once."""

    def __init__(self, spelling: Spelling, pieces: Sequence[Piece], calls: Iterable[Call] = ()) -> None:
        """`calls` are those of the chat's answers. Only a prompt in one piece takes the model's spelling of them."""
        self._spelling = spelling
        self._pieces = pieces
        self._calls = frozenset(calls) if len(pieces) == 1 else frozenset()
        self._text = "".join(piece.text for piece in pieces)
        self._done = 0
        """Characters of the text that are encoded."""
        self._token_ids: list[int] = []
        self._plain_control: list[int] = []

    def spliced(self, answers: Sequence[Answer]) -> Spliced | None:
        """Return the prompt's tokens with all answers that it repeats, or None if it repeats none. Raises
        PromptError."""
        num_spliced = moved = 0
        for place, candidates in placed(self._text, answers):
            # A call in another spelling has moved what follows it.
            at = place + moved
            if at < self._done:
                continue
            length = len(self._text)
            best = max((self._match(at, ids) for ids in candidates), key=lambda match: len(match.token_ids))
            if best.token_ids and self._take(at, best):
                num_spliced += len(best.token_ids)
                moved += len(self._text) - length
        if not num_spliced:
            return None
        rest = self._encode(self._done, len(self._text), self._token_ids[-1])
        return Spliced(
            token_ids=self._token_ids + rest,
            plain_control=self._plain_control + self._spelling.control(rest),
            num_spliced=num_spliced,
        )

    def _match(self, at: int, token_ids: list[int]) -> _Match:
        """Return how much of an answer the text repeats from `at` on."""
        context = self._context(at)
        before = self._spelling.decode(context)

        def shown(count: int) -> str:
            return self._spelling.decode(context + token_ids[:count])[len(before) :]

        # The last character may be incomplete.
        begin = shown(_FIRST_TOKENS).rstrip(REPLACEMENT)
        if not self._calls and not self._text.startswith(begin, at):
            token_ids = token_ids[:_FIRST_TOKENS]
        answer = shown(len(token_ids))
        text = respelled(self._text, at, answer, self._calls) if self._calls else self._text
        if not self._may_part(text, at):
            return _Match([], at, text)
        equal = _num_equal(answer, text, at)
        most = len(token_ids)
        if equal < len(answer):
            most = bisect_right(range(most), equal, key=lambda index: len(shown(index + 1)))
        for count in range(most, max(most - _MOST_STEPS_BACK, 0), -1):
            part = answer if count == len(token_ids) else shown(count)
            end = at + len(part)
            is_whole = count == len(token_ids) or not _splits_word(text, end)
            if part and is_whole and text.startswith(part, at) and self._may_part(text, end):
                return _Match(token_ids[:count], end, text)
        return _Match([], at, text)

    def _take(self, at: int, match: _Match) -> bool:
        """Add the text up to `at`, and the answer's tokens. Return False, and add nothing, if they could change the
        text or what is a control token."""
        last = self._token_ids[-1] if self._token_ids else None
        before = self._encode(self._done, at, last) if at > self._done else []
        if before:
            last = before[-1]
        pieces, text = self._pieces, self._text
        if match.text != text:
            self._pieces, self._text = [Piece(match.text, pieces[0].is_template)], match.text
        plain = self._encode(at, match.end, last)
        control = self._spelling.control
        is_safe = plain == match.token_ids or (
            self._control_places(at, plain) == self._control_places(at, match.token_ids)
            and self._shown(at, plain, match.end) == self._shown(at, match.token_ids, match.end)
        )
        if not is_safe:
            self._pieces, self._text = pieces, text
            return False
        self._token_ids += before + match.token_ids
        self._plain_control += control(before) + control(plain)
        self._done = match.end
        return True

    def _control_places(self, at: int, token_ids: list[int]) -> list[tuple[str, int]]:
        """Return the control tokens of a part, each with the text before it from the last one on."""
        control = frozenset(self._spelling.control(token_ids))
        if not control:
            return []
        context = self._context(at)
        shown, start = context + token_ids, 0
        places: list[tuple[str, int]] = []
        for end in range(len(context), len(shown)):
            if shown[end] in control:
                places.append((self._spelling.decode(shown[start:end]), shown[end]))
                start = end
        return places

    def _shown(self, at: int, token_ids: list[int], end: int) -> str:
        """Return the text of a part's tokens with what is before and behind it in the prompt."""
        behind = self._encode(end, end + _BORDER_CHARACTERS, token_ids[-1])
        return self._spelling.decode(self._context(at) + token_ids + behind)

    def _context(self, at: int) -> list[int]:
        return self._encode(max(0, at - _BORDER_CHARACTERS), at, None)[-_CONTEXT_TOKENS:]

    def _may_part(self, text: str, at: int) -> bool:
        """Return whether the text's parts before and behind `at` make tokens of the same text as the whole."""
        if not 0 < at < len(text):
            return True
        pieces = self._pieces if text is self._text else [Piece(text, self._pieces[0].is_template)]
        start, end, decode = max(0, at - _BORDER_CHARACTERS), at + _BORDER_CHARACTERS, self._spelling.decode
        first = self._encode(start, at, None, pieces)
        parts = first + self._encode(at, end, first[-1], pieces)
        return decode(parts) == decode(self._encode(start, end, None, pieces))

    def _encode(
        self, start: int, end: int, last: int | None, pieces: Sequence[Piece] | None = None
    ) -> list[int]:
        """Return the tokens of a part of the text, or of other pieces, which follows the token `last`."""
        token_ids: list[int] = []
        begin = 0
        for piece in self._pieces if pieces is None else pieces:
            part = piece.text[max(0, start - begin) : max(0, end - begin)]
            begin += len(piece.text)
            if part:
                after = token_ids[-1] if token_ids else last
                token_ids += self._spelling.encode_part(part, is_template=piece.is_template, after=after)
        return token_ids


def _splits_word(text: str, at: int) -> bool:
    return 0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum()


def _num_equal(answer: str, text: str, at: int) -> int:
    """Return how many characters of an answer the text repeats from `at` on."""
    if text.startswith(answer, at):
        return len(answer)
    return bisect_right(
        range(1, len(answer) + 1), False, key=lambda num: not text.startswith(answer[:num], at)
    )


def respelled(text: str, at: int, answer: str, calls: Set[Call]) -> str:
    """Return the text with the answer's spelling of its tool calls, where the answer begins at `at`.

    Chat templates write a call's JSON with spaces of their own. The same call in the model's spelling says the same,
    and its tokens are cached. The chat's other text stays as it is.
    """
    done = 0
    while True:
        equal = _num_equal(answer[done:], text, at + done)
        if done + equal == len(answer):
            return text
        found = _same_call(answer, text[at:], done, done + equal, calls)
        if found is None:
            return text
        answers_end, texts_end, start = found
        text = text[: at + start] + answer[start:answers_end] + text[at + texts_end :]
        done = answers_end


def _same_call(
    answer: str, text: str, start: int, first_unequal: int, calls: Set[Call]
) -> tuple[int, int, int] | None:
    """Return the ends of one call in an answer and in a text that has it in another spelling, and where it begins in
    both."""
    decoder = json.JSONDecoder()
    begin = start
    for _ in range(_MOST_BRACES):
        begin = answer.find("{", begin, first_unequal)
        if begin < 0:
            return None
        try:
            of_answer, answers_end = decoder.raw_decode(answer, begin)
            of_text, texts_end = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            begin += 1
            continue
        if answers_end > first_unequal and _are_same(of_answer, of_text, calls):
            return answers_end, texts_end, begin
        begin += 1
    return None


def _are_same(of_answer: dict[str, Any], of_text: dict[str, Any], calls: Set[Call]) -> bool:
    """Return whether two JSON objects are the same call of the chat, or the same arguments of one. The text's object
    must have no key that the answer's lacks, such as an id that a result refers to."""
    spelling = _one_spelling(of_text)
    if spelling == _one_spelling(of_answer):
        name = of_text.get("name")
        own = [_one_spelling(of_text[key]) for key in ARGUMENT_KEYS if key in of_text]
        return any(
            call.arguments == spelling or (call.name == name and call.arguments in own) for call in calls
        )
    return False


def _one_spelling(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def calls_of(messages: Iterable[Mapping[str, Any]]) -> list[Call]:
    """Return the calls of a chat's messages, whose arguments are JSON objects."""
    return [
        Call(call["function"]["name"], _one_spelling(call["function"]["arguments"]))
        for message in messages
        for call in message.get("tool_calls", ())
        if isinstance(call["function"]["arguments"], dict)
    ]
