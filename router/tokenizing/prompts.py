"""Prompts as a client sends them: text, a chat or token ids, and a chat in the form of chat templates. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

ROLES = frozenset({"system", "user", "assistant", "tool"})


class PromptError(ValueError):
    """The client's mistake. The message is a fixed sentence and quotes nothing of the prompt."""


class TemplateKwargsError(PromptError):
    """The client's variables for the chat template are wrong."""


class PromptTooLong(PromptError):
    """The prompt has more tokens than allowed. Counting stopped there."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str
    name: str = ""
    """The speaker's name. Empty: none."""
    tool_calls: str = ""
    """A JSON list of the calls that the message makes, in OpenAI's form. Empty: none."""
    tool_call_id: str = ""
    """Id of the call that the message answers. Empty: none."""
    reasoning: str = ""
    """The reasoning before the content. Empty: none."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: Sequence[ChatMessage]
    template_kwargs: str = ""
    """A JSON object of further variables for the template. Empty: none."""
    add_generation_prompt: bool = True
    """The prompt ends with the beginning of an answer."""
    continue_final_message: bool = False
    """The prompt ends within the last message, after its content. Excludes `add_generation_prompt`."""
    tools: str = ""
    """A JSON list of the tools that the model may call, in OpenAI's form. Empty: none."""

    def texts(self) -> Iterator[str]:
        """Yield all texts that the client wrote."""
        for message in self.messages:
            yield message.content
            yield message.name
            yield message.tool_calls
            yield message.tool_call_id
            yield message.reasoning
        yield self.template_kwargs
        yield self.tools


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: Sequence[int]


PromptInput = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat in the form that the tokenizer's chat template takes."""

    messages: list[dict[str, Any]]
    tools: Any
    """The tools as JSON values, or None."""
    kwargs: Any
    """Further variables for the template by name, as JSON values."""
    options: Mapping[str, Any]
    """Further keyword arguments of `apply_chat_template`."""

    @classmethod
    def of(cls, prompt: ChatPrompt) -> Chat:
        names = ("add_generation_prompt", "continue_final_message")
        return cls(
            [_template_message(message) for message in prompt.messages],
            json.loads(prompt.tools or "null"),
            json.loads(prompt.template_kwargs or "{}"),
            {name: getattr(prompt, name) for name in names},
        )

    def changed(self, content: Callable[[str], str], other: Callable[[str], str]) -> Chat:
        """Return a copy with contents changed by `content`, and all other strings of the client by `other`.

        Empty ones stay as they are.
        """
        messages = [
            {
                "role": message["role"],
                "content": content(message["content"]) if message["content"] else "",
                **{
                    name: _with_strings(value, other)
                    for name, value in message.items()
                    if name not in ("role", "content")
                },
            }
            for message in self.messages
        ]
        return replace(
            self,
            messages=messages,
            tools=_with_strings(self.tools, other),
            kwargs=_with_strings(self.kwargs, other),
        )


def _template_message(message: ChatMessage) -> dict[str, Any]:
    """Return a message as chat templates take it: arguments of calls as objects."""
    fields = {
        "name": message.name,
        "tool_calls": [_template_call(call) for call in json.loads(message.tool_calls or "[]")],
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning,
    }
    return {"role": message.role, "content": message.content, **{n: v for n, v in fields.items() if v}}


def _template_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
        # JSON can spell a lone surrogate, which is not a character.
        json.dumps(arguments, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        arguments = None
    # Text that is no object stays text: an output may have been cut off within its arguments.
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _with_strings(value: Any, change: Callable[[str], str]) -> Any:
    match value:
        case str():
            return change(value) if value else value
        case list():
            return [_with_strings(item, change) for item in value]
        case dict():
            return {key: _with_strings(item, change) for key, item in value.items()}
        case _:
            return value


def inner_keys(value: Any) -> Iterator[str]:
    """Yield the keys of all objects inside an object or list."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        if isinstance(item, dict):
            yield from item
        yield from inner_keys(item)


def check_messages(messages: Sequence[ChatMessage]) -> None:
    if not messages:
        raise PromptError("the chat has no messages")
    if any(message.role not in ROLES for message in messages):
        raise PromptError("a message's role must be system, user, assistant or tool")
