"""Prompt encoder: turns a client's prompt into token ids. Users' text never becomes control tokens.

Owns chat rendering. What transformers renders is served: guard.py tells which parts may become control tokens, and that
changes how a text is encoded, never whether. Pure: the tokenizer is an argument. Does not own the process that runs it
(service.py).
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from blockyard.router.parsing.formats import NO_END, PromptEnd
from blockyard.router.tokenizing.guard import Guard, RenderedPart
from blockyard.router.tokenizing.prompts import (
    Chat,
    ChatPrompt,
    PromptError,
    PromptInput,
    PromptTooLong,
    TemplateKwargsError,
    TextPrompt,
    TokenPrompt,
    check_messages,
)
from blockyard.router.tokenizing.splices import Answer, Piece, Splicer, calls_of
from jinja2 import TemplateError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

MAX_TOKEN_ID = 2**31 - 1
"""Token ids are sent and named as int32."""
CHARACTERS_A_TOKEN = 4
"""A text of at most this many characters per allowed token is encoded at once, without counting first."""
COUNTED_CHARACTERS = 65_536
"""Tokens of a longer text are counted in pieces of this many characters."""
BEFORE_CHARACTERS = 256
"""Text before an answer that tells a parser how the answer begins."""
LEAD = "\n"
"""Text before a part of a prompt, for tokenizers that encode the begin of a text otherwise than the rest."""
TEMPLATE_NAMES = frozenset({"messages", "raise_exception", "strftime_now"})
"""Variables of every chat template, besides the arguments of `apply_chat_template` and the special tokens."""


@dataclass(frozen=True, slots=True)
class Encoded:
    token_ids: list[int]
    text: str
    """The prompt's text. Empty for token ids."""
    num_spliced: int = 0
    """Tokens that come from earlier answers as they were sampled."""
    is_guarded: bool = False
    """Whether a client's text had a control token, which is encoded as plain text."""
    end: PromptEnd = NO_END
    """The prompt's end, for an answer that the prompt begins."""


class PromptEncoder:
    """Encodes prompts with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend = _backend(tokenizer)
        self._guard = Guard(tokenizer)
        self._control_ids = frozenset(self._guard.tokens)
        self._template_names = TEMPLATE_NAMES | {
            *inspect.signature(tokenizer.apply_chat_template).parameters,
            *tokenizer.special_tokens_map,
        }
        self._vocab_size = len(tokenizer)
        self._start_ids, self._end_ids = self._frame()
        self._marks_begin = any(
            self._encode(token + "a")[1:] != self._encode("a") for token in list(self._guard.id_of)[:1]
        )
        """Whether a text's begin is encoded otherwise than the same text behind a control token."""

    def encode(self, prompt: PromptInput, *, max_tokens: int | None = None) -> list[int]:
        """Return the prompt's token ids, at least one.

        Raises PromptTooLong for a text with far more than `max_tokens`, and PromptError for other faults.
        """
        return self.encode_with(prompt, (), max_tokens=max_tokens).token_ids

    def encode_with(
        self, prompt: PromptInput, answers: Sequence[Answer], *, max_tokens: int | None = None
    ) -> Encoded:
        """Encode a prompt, with the tokens of earlier `answers` where it repeats their text (splices.py). Raises
        PromptTooLong and PromptError."""
        answers = [self._known(answer) for answer in answers]
        match prompt:
            case TextPrompt(text):
                if not text:
                    raise PromptError("the prompt is empty")
                self._check_length([text], max_tokens)
                encoded = self._encode_text(text, answers)
            case ChatPrompt():
                self._check_length(list(prompt.texts()), max_tokens)
                encoded = self._encode_chat(prompt, answers)
            case TokenPrompt(ids):
                if any(not 0 <= token_id <= MAX_TOKEN_ID for token_id in ids):
                    raise PromptError("a token id of the prompt is out of range")
                encoded = Encoded(list(ids), "")
        if not encoded.token_ids:
            raise PromptError("the prompt has no tokens")
        return encoded

    def _check_length(self, texts: Sequence[str], max_tokens: int | None) -> None:
        """Count the tokens of long texts in pieces. Raises PromptTooLong as soon as there are too many.

        A cut between pieces may add a few tokens.
        """
        if max_tokens is None or sum(len(text) for text in texts) <= CHARACTERS_A_TOKEN * max_tokens:
            return
        num_tokens = 0
        for text in texts:
            for at in range(0, len(text), COUNTED_CHARACTERS):
                num_tokens += len(self._encode(text[at : at + COUNTED_CHARACTERS], split_special=True))
                if num_tokens > max_tokens:
                    raise PromptTooLong(f"the prompt has more than {max_tokens} tokens")

    def _known(self, answer: Answer) -> Answer:
        """Return an answer up to the first token that the tokenizer does not know."""
        if max(answer.token_ids, default=0) < self._vocab_size:
            return answer
        known = takewhile(lambda token_id: token_id < self._vocab_size, answer.token_ids)
        return Answer(answer.place, list(known))

    def _encode_text(self, text: str, answers: Sequence[Answer]) -> Encoded:
        found = Splicer(self, [Piece(text, is_template=False)]).spliced(answers) if answers else None
        token_ids, num_spliced = (
            (self._spell(text), 0) if found is None else (found.token_ids, found.num_spliced)
        )
        is_guarded = self._guard.written.search(text) is not None
        return Encoded([*self._start_ids, *token_ids, *self._end_ids], text, num_spliced, is_guarded)

    def _encode_chat(self, prompt: ChatPrompt, answers: Sequence[Answer]) -> Encoded:
        check_messages(prompt.messages)
        chat = Chat.of(prompt)
        self._check_kwargs(chat.kwargs)
        try:
            rendered = self._render(chat)
        except PromptError:
            chat, objects = Chat.of(prompt, has_objects=False), chat
            if chat == objects:
                raise
            rendered = self._render(chat)
        parts = self._parts(chat, rendered)
        pieces, token_ids = self._pieces(parts)
        text = "".join(piece.text for piece in pieces)
        is_guarded = len(pieces) > 1 or text != rendered
        end = self._end(parts) if prompt.continue_final_message else NO_END
        num_spliced = 0
        found = Splicer(self, pieces, calls_of(chat.messages)).spliced(answers) if answers else None
        if found is not None and found.plain_control == self.control(token_ids):
            token_ids, num_spliced = found.token_ids, found.num_spliced
        return Encoded(token_ids, text, num_spliced, is_guarded, end)

    def _end(self, parts: Sequence[RenderedPart]) -> PromptEnd:
        """Return where an answer begins that the prompt has the beginning of: after the last control token but those of
        an answer."""
        begin = max(
            (
                at
                for at, part in enumerate(parts, 1)
                if part.is_control and not self._guard.tags.fullmatch(part.text)
            ),
            default=0,
        )
        before, begun = ("".join(part.text for part in some) for some in (parts[:begin], parts[begin:]))
        return PromptEnd(before[-BEFORE_CHARACTERS:], begun)

    def _parts(self, chat: Chat, rendered: str) -> list[RenderedPart]:
        """Return the parts of a rendered chat.

        A template that reads a tag in an answer finds it. One that reads a control token in another text does not, so
        the text of the parts may be another one.
        """
        twins = self._guard.twins(rendered)
        found: list[RenderedPart] = []
        tried: list[Chat] = []
        ways: tuple[tuple[Callable[[str], str], Callable[[str], str]], ...] = (
            (twins.of_core, twins.of_answer),
            (twins.of_client, twins.of_answer),
            (twins.of_client, str),
        )
        for of_client, of_answer in ways:
            hidden = chat.changed(of_client, of_answer)
            if hidden in tried:
                continue
            tried.append(hidden)
            try:
                parts = list(twins.parts(rendered if hidden == chat else self._render(hidden)))
            except PromptError:
                continue
            if "".join(part.text for part in parts) == rendered:
                return parts
            found = found or parts
        # Where the template refuses what it does not find, nothing is known to be its own.
        return found or [RenderedPart(rendered, is_control=False, has_client=True)]

    def _pieces(self, parts: Sequence[RenderedPart]) -> tuple[list[Piece], list[int]]:
        """Return the pieces of a chat and their token ids. It is one piece if that makes no control token of a client's
        text."""
        written = Counter(self._guard.id_of[part.text] for part in parts if part.is_control)
        pieces = [Piece("".join(part.text for part in parts), is_template=True)]
        token_ids = self._encode(pieces[0].text)
        # The last way is for a tokenizer that finds a control token in other characters, which it normalises.
        ways: tuple[Callable[[RenderedPart], bool], ...] = (
            attrgetter("has_client"),
            lambda part: not part.is_control,
        )
        for is_plain in ways:
            if Counter(self.control(token_ids)) <= written:
                break
            pieces = [
                Piece("".join(part.text for part in group), is_template=not plain)
                for plain, group in groupby(parts, is_plain)
            ]
            token_ids = []
            for piece in pieces:
                after = token_ids[-1] if token_ids else None
                token_ids += self.encode_part(piece.text, is_template=piece.is_template, after=after)
        return pieces, token_ids

    def _check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Check the names of the variables. Raises TemplateKwargsError."""
        if any(name in self._template_names or name.endswith(("_token", "_tokens")) for name in kwargs):
            raise TemplateKwargsError("a name is already a variable of the chat template")

    def _render(self, chat: Chat) -> str:
        if not self._tokenizer.chat_template:
            raise PromptError("this model has no chat template: send a prompt instead of messages")
        try:
            rendered = self._tokenizer.apply_chat_template(
                chat.messages, tools=chat.tools, tokenize=False, **chat.options, **chat.kwargs
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError):
            # The template's own message may quote the chat.
            raise PromptError("the model's chat template refused these messages") from None
        return str(rendered)

    def _spell(self, text: str, *, is_begin: bool = True) -> list[int]:
        """Return the token ids of a text, with its control tokens spelled as ordinary text."""
        token_ids: list[int] = []
        for pieces in ([text], self._guard.cut.split(text), text):
            token_ids = [
                token_id
                for at, piece in enumerate(pieces)
                for token_id in self._plain(piece, is_begin=is_begin and not at)
            ]
            if not self.control(token_ids):
                break
        # A character that is a control token and nothing else to this tokenizer cannot be spelled.
        return [token_id for token_id in token_ids if token_id not in self._control_ids]

    def _plain(self, text: str, *, is_begin: bool) -> list[int]:
        """Return the token ids of a text in which no special token is read."""
        if self._marks_begin and not is_begin:
            lead, token_ids = (self._encode(some, split_special=True) for some in (LEAD, LEAD + text))
            if token_ids[: len(lead)] == lead:
                return token_ids[len(lead) :]
        return self._encode(text, split_special=True)

    def _encode(self, text: str, *, split_special: bool = False, frame: bool = False) -> list[int]:
        if self._backend is not None:
            self._backend.encode_special_tokens = split_special
            (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=frame)
            return encoded.ids
        # verbose=False: a prompt above the tokenizer's own limit is checked elsewhere and needs no warning.
        encoding = self._tokenizer(
            text, add_special_tokens=frame, split_special_tokens=split_special, verbose=False
        )
        return list(encoding["input_ids"])

    def encode_part(self, text: str, *, is_template: bool, after: int | None = None) -> list[int]:
        """Return the token ids of a part of a prompt, which follows the token `after`. The users' text never becomes
        control tokens."""
        if not is_template:
            return self._spell(text, is_begin=after is None)
        if after in self._control_ids:
            # Some tokenizers encode the begin of a text otherwise than what follows a control token.
            token_ids = self._encode(self._guard.tokens[after] + text)
            if token_ids[0] == after:
                return token_ids[1:]
        return self._encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of these tokens, with the text of control tokens."""
        if self._backend is not None:
            return str(self._backend.decode(token_ids, skip_special_tokens=False))
        return str(self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    def control(self, token_ids: Iterable[int]) -> list[int]:
        """Return the control tokens among these, in order."""
        return list(filter(self._control_ids.__contains__, token_ids))

    def _frame(self) -> tuple[list[int], list[int]]:
        """Return the token ids that the tokenizer puts before and after a text, such as a beginning-of-sequence
        token."""
        framed, bare = self._encode("a", frame=True), self._encode("a")
        start = next(at for at in range(len(framed)) if framed[at : at + len(bare)] == bare)
        return framed[:start], framed[start + len(bare) :]


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """Return the part of a tokenizer that is written in Rust. The wrapper around the same call takes as long again,
    because it makes masks and offsets too.

    Return None for a tokenizer whose class adds steps of its own.
    """
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    if not isinstance(tokenizer, Fast) or kind.__call__ is not Fast.__call__:
        return None
    if kind._encode_plus is not Fast._encode_plus:
        return None
    backend: Tokenizer = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return backend
