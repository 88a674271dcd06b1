"""Wire format between the router and its tokenizer process: prompts there, token ids and block names back.

Pure. A frame is a length and then as many bytes. Its content is one line of JSON, followed by packed tokens, names and
texts. Megabytes of text as JSON would block the router's event loop. Never a pickle: nothing that is read can run.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import IO, Any, TypeAlias

from blockyard.proto.naming.block_hash import NAME_BYTES, TOKEN_BYTES, pack_tokens, unpack_tokens
from blockyard.router.parsing.formats import NO_END, PromptEnd
from blockyard.router.tokenizing.prompts import (
    ChatMessage,
    ChatPrompt,
    PromptError,
    PromptInput,
    PromptTooLong,
    TemplateKwargsError,
    TextPrompt,
    TokenPrompt,
)

_LENGTH = struct.Struct("<Q")
_CHAT_OPTIONS = ("template_kwargs", "add_generation_prompt", "continue_final_message")
_LONG_FIELDS = ("content", "tool_calls", "reasoning")
"""Fields of a message that may have megabytes."""


class TokenizingError(RuntimeError):
    """Our failure, not the client's. The message quotes nothing of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    prompt: PromptInput
    root: bytes | None
    """Start of the chain of block names. None: name no blocks."""
    block_size: int
    max_tokens: int | None = None
    """A text with clearly more tokens is refused."""
    keep_last: int | None = None
    """A prompt with more tokens than this keeps only its last ones."""
    answers: bytes | None = None
    """Earlier answers of the prompt's session, packed (splices.py). None: the prompt belongs to none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A prompt as the Submit message to a worker has it."""

    token_ids: bytes
    """Packed little-endian int32."""
    num_tokens: int
    block_names: bytes
    """The root's name, then those of the prompt's full blocks, 16 bytes each. Empty without a root."""
    place: bytes = b""
    """Place of the answer (splices.py), for a prompt of a session. Empty: the answer is not kept."""
    num_spliced: int = 0
    """Tokens that come from earlier answers as they were sampled."""
    end: PromptEnd = NO_END
    """The prompt's end, for an answer that the prompt begins."""
    is_guarded: bool = False
    """Whether a client's text had a control token, which is encoded as plain text."""


Answer: TypeAlias = Prepared | Exception | None
"""The process's reply to a question. None reports that the tokenizer is loaded."""
_ERRORS: dict[str, type[Exception]] = {
    "long": PromptTooLong,
    "kwargs": TemplateKwargsError,
    "prompt": PromptError,
    "tokenizing": TokenizingError,
    "os": OSError,
    "value": ValueError,
}
"""Errors by their name in a frame. Subclasses come before their bases. Any other error arrives as a ValueError."""


class Frames:
    """Joins the pieces of a byte stream and splits them into the contents of frames."""

    def __init__(self) -> None:
        self._received = bytearray()

    def push(self, data: bytes) -> Iterator[bytes]:
        self._received += data
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            content = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
            yield content


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Return the content of the next frame, or None at the end of the stream."""
    length = stream.read(_LENGTH.size)
    return stream.read(_LENGTH.unpack(length)[0]) if len(length) == _LENGTH.size else None


def start_frame(chat_template: str | None) -> bytes:
    """Return the router's first frame. `chat_template` replaces the tokenizer's own."""
    return _frame({"chat_template": chat_template}, b"")


def parse_start(content: bytes) -> str | None:
    chat_template: str | None = _parts(content)[0]["chat_template"]
    return chat_template


def question_frame(question: Question) -> bytes:
    head: dict[str, Any] = {"block_size": question.block_size, "has_root": question.root is not None}
    head |= {"max_tokens": question.max_tokens, "keep_last": question.keep_last}
    if question.answers is not None:
        head["answers_bytes"] = len(question.answers)
    body = (question.root or b"") + (question.answers or b"")
    match question.prompt:
        case TextPrompt(text):
            head["text"] = True
            body += _encoded(text)
        case ChatPrompt(messages):
            texts = [_encoded(getattr(message, name)) for message in messages for name in _LONG_FIELDS]
            texts.append(_encoded(question.prompt.tools))
            head["chat"] = [[message.role, message.name, message.tool_call_id] for message in messages]
            head["sizes"] = list(map(len, texts))
            head["options"] = {name: getattr(question.prompt, name) for name in _CHAT_OPTIONS}
            body += b"".join(texts)
        case TokenPrompt(token_ids):
            body += pack_tokens(token_ids)
    return _frame(head, body)


def parse_question(content: bytes) -> Question:
    head, body = _parts(content)
    root_bytes = NAME_BYTES if head["has_root"] else 0
    begin = root_bytes + head.get("answers_bytes", 0)
    prompt: PromptInput
    if "text" in head:
        prompt = TextPrompt(_decoded(body[begin:]))
    elif "chat" in head:
        ends = accumulate(head["sizes"], initial=begin)
        *texts, tools = [_decoded(body[start:end]) for start, end in pairwise(ends)]
        count = len(_LONG_FIELDS)
        messages = [
            ChatMessage(
                role,
                name=name,
                tool_call_id=call_id,
                **dict(zip(_LONG_FIELDS, texts[at * count : (at + 1) * count], strict=True)),
            )
            for at, (role, name, call_id) in enumerate(head["chat"])
        ]
        prompt = ChatPrompt(messages, tools=tools, **head["options"])
    else:
        prompt = TokenPrompt(unpack_tokens(body[begin:]))
    return Question(
        prompt=prompt,
        root=body[:root_bytes] or None,
        block_size=head["block_size"],
        max_tokens=head["max_tokens"],
        keep_last=head["keep_last"],
        answers=body[root_bytes:begin] if "answers_bytes" in head else None,
    )


def _encoded(text: str) -> bytes:
    """Return any text as UTF-8, even one with lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


def _decoded(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def answer_frame(answer: Answer) -> bytes:
    match answer:
        case None:
            return _frame({}, b"")
        case Prepared():
            head: dict[str, Any] = {"num_tokens": answer.num_tokens, "is_guarded": answer.is_guarded}
            if answer.place:
                head |= {"place_bytes": len(answer.place), "num_spliced": answer.num_spliced}
            ends = [_encoded(answer.end.before), _encoded(answer.end.begun)] if answer.end else []
            head["end_bytes"] = list(map(len, ends))
            return _frame(head, b"".join((*ends, answer.place, answer.token_ids, answer.block_names)))
        case Exception():
            kind = next((kind for kind, error in _ERRORS.items() if isinstance(answer, error)), "value")
            return _frame({"error": kind, "text": str(answer)}, b"")


def parse_answer(content: bytes) -> Answer:
    head, body = _parts(content)
    if "error" in head:
        return _ERRORS[head["error"]](head["text"])
    if "num_tokens" not in head:
        return None
    num_tokens: int = head["num_tokens"]
    texts = list(accumulate(head["end_bytes"], initial=0))
    begin = texts[-1] + head.get("place_bytes", 0)
    end = begin + num_tokens * TOKEN_BYTES
    return Prepared(
        token_ids=body[begin:end],
        num_tokens=num_tokens,
        block_names=body[end:],
        place=body[texts[-1] : begin],
        num_spliced=head.get("num_spliced", 0),
        end=PromptEnd(*(_decoded(body[start:stop]) for start, stop in pairwise(texts))),
        is_guarded=head["is_guarded"],
    )


def _frame(head: dict[str, Any], body: bytes) -> bytes:
    line = json.dumps(head).encode() + b"\n"
    return b"".join((_LENGTH.pack(len(line) + len(body)), line, body))


def _parts(content: bytes) -> tuple[dict[str, Any], bytes]:
    line, _, body = content.partition(b"\n")
    head: dict[str, Any] = json.loads(line)
    return head, body
