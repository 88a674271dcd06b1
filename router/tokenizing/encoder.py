"""Prompt encoder: turns a client's prompt into token ids. Users' text never becomes control tokens.

Owns chat rendering, and the rule that a user cannot write a control token as text. Pure: the tokenizer is an argument.
Does not own the process that runs it (service.py).

Control tokens are the special tokens, and the added tokens that the chat template writes.
"""

from __future__ import annotations

import inspect
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from typing import TYPE_CHECKING, Any

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
    inner_keys,
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
TEMPLATE_NAMES = frozenset({"messages", "raise_exception", "strftime_now"})
"""Variables of every chat template, besides the arguments of `apply_chat_template` and the special tokens."""

_Segments = tuple[list[str], list[str]]
"""Texts of the template, and the users' texts between them: always one fewer."""


@dataclass(frozen=True, slots=True)
class Encoded:
    token_ids: list[int]
    text: str
    """The prompt's text. Empty for token ids."""
    num_spliced: int = 0
    """Tokens that come from earlier answers as they were sampled."""


class PromptEncoder:
    """Encodes prompts with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend = _backend(tokenizer)
        control = _control_tokens(tokenizer)
        self._control_texts = control
        self._control_ids = frozenset(control)
        ends = {character for token in control.values() for character in (token[:1], token[-1:])}
        self._delimiters = frozenset(character for character in ends if not character.isalnum())
        """First and last characters of control tokens, such as < and >. A text without them cannot complete one."""
        worded = [token for token in control.values() if token[0].isalnum() or token[-1].isalnum()]
        self._heads = tuple(token[:at] for token in worded for at in range(1, len(token)))
        self._tails = tuple(token[at:] for token in worded for at in range(1, len(token)))
        """Parts of control tokens that begin or end with a letter. Ordinary words may end in such a part too."""
        longest_first = sorted(control.values(), key=len, reverse=True)
        # Splits "<|x|>" after its "<". Neither part is a control token.
        self._cut = re.compile(
            "|".join(f"(?<={re.escape(t[0])})(?={re.escape(t[1:])})" for t in longest_first)
        )
        self._template_names = TEMPLATE_NAMES | {
            *inspect.signature(tokenizer.apply_chat_template).parameters,
            *tokenizer.special_tokens_map,
        }
        self._vocab_size = len(tokenizer)
        self._start_ids, self._end_ids = self._frame()

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
        return Encoded([*self._start_ids, *token_ids, *self._end_ids], text, num_spliced)

    def _encode_chat(self, prompt: ChatPrompt, answers: Sequence[Answer]) -> Encoded:
        check_messages(prompt.messages)
        chat = Chat.of(prompt)
        self._check_kwargs(chat.kwargs)
        calls = [message["tool_calls"] for message in chat.messages if "tool_calls" in message]
        if any(map(self._may_control, set(inner_keys([chat.tools, calls])))):
            raise PromptError("a key in tools or in a call's arguments may contain part of a control token")
        rendered = self._render(chat)
        segments = self._segments(chat)
        template_control = self._template_control(chat, segments)
        whole = [Piece(rendered, is_template=True)]
        found = Splicer(self, whole, calls_of(chat.messages)).spliced(answers) if answers else None
        if found is not None and found.plain_control == template_control:
            return Encoded(found.token_ids, rendered, found.num_spliced)
        joint = self._encode(rendered)
        if self.control(joint) == template_control:
            return Encoded(joint, rendered)
        if segments is None:
            raise PromptError("the chat template cannot separate this chat's text from its own")
        pieces = [
            Piece(text, is_template)
            for texts in zip_longest(*segments, fillvalue="")
            for text, is_template in zip(texts, (True, False), strict=True)
            if text
        ]
        text = "".join(piece.text for piece in pieces)
        found = Splicer(self, pieces).spliced(answers) if answers else None
        if found is not None and found.plain_control == template_control:
            return Encoded(found.token_ids, text, found.num_spliced)
        token_ids: list[int] = []
        for piece in pieces:
            token_ids += self.encode_part(piece.text, is_template=piece.is_template)
        return Encoded(token_ids, text)

    def _template_control(self, chat: Chat, segments: _Segments | None) -> list[int]:
        """Return the control tokens, in order, that the template itself writes around the chat's texts."""
        if segments is not None:
            return [token_id for text in segments[0] for token_id in self.control(self._encode(text))]

        def neutral(text: str) -> str:
            return secrets.token_hex(8)

        neutral_chat = chat.changed(neutral, lambda text: neutral(text) if self._may_control(text) else text)
        return self.control(self._encode(self._render(neutral_chat)))

    def _segments(self, chat: Chat) -> _Segments | None:
        """Render the chat and split it into the template's texts and the users' texts between them.

        Random marks around each content show the borders. A name or a variable may decide what the template writes, so
        it is marked only if it could be or complete a control token. Return None if the template drops or cuts a text
        with its mark.
        """
        nonce = secrets.token_hex(8)
        marked: list[str] = []

        def mark(text: str) -> str:
            owner = str(len(marked))
            marked.append(owner)
            return f"{nonce}o{owner}z{text}{nonce}c{owner}z"

        marked_chat = chat.changed(mark, lambda text: mark(text) if self._may_control(text) else text)
        pieces = re.split(rf"{nonce}([oc])(\d+)z", self._render(marked_chat))
        texts, kinds, owners = pieces[0::3], pieces[1::3], pieces[2::3]
        in_pairs = kinds == ["o", "c"] * (len(kinds) // 2) and owners[0::2] == owners[1::2]
        if not in_pairs or set(owners) != set(marked):
            return None
        return texts[0::2], texts[1::2]

    def _may_control(self, text: str) -> bool:
        """Return True if the text contains a control token, or a part that other texts could complete to one."""
        is_part = text.endswith(self._heads) or text.startswith(self._tails)
        return is_part or not self._delimiters.isdisjoint(text) or bool(self.control(self._encode(text)))

    def _check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Check the names of the variables. Raises TemplateKwargsError."""
        if any(name in self._template_names or name.endswith(("_token", "_tokens")) for name in kwargs):
            raise TemplateKwargsError("a name is already a variable of the chat template")
        if any(self._may_control(key) for key in inner_keys(kwargs)):
            raise TemplateKwargsError("a key may contain part of a control token")

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

    def _spell(self, text: str) -> list[int]:
        """Return the token ids of a text, with its control tokens spelled as ordinary text. Raises PromptError if they
        cannot be."""
        for pieces in ([text], self._cut.split(text)):
            token_ids = [token_id for piece in pieces for token_id in self._encode(piece, split_special=True)]
            if not self.control(token_ids):
                return token_ids
        raise PromptError("the text holds a control token that this tokenizer cannot spell as text")

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
        control tokens. Raises PromptError."""
        if not is_template:
            return self._spell(text)
        if after in self._control_ids:
            # Some tokenizers encode the begin of a text otherwise than what follows a control token.
            token_ids = self._encode(self._control_texts[after] + text)
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


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    template = str(tokenizer.chat_template or "")
    return {
        token_id: token.content
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special or token.content in template
    }
