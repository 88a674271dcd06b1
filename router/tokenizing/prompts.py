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
    def of(cls, prompt: ChatPrompt, *, has_objects: bool = True) -> Chat:
        """`has_objects`: the template gets the arguments of calls as objects, as most do, and not as JSON text."""
        names = ("add_generation_prompt", "continue_final_message")
        return cls(
            [_template_message(message, has_objects=has_objects) for message in prompt.messages],
            json.loads(prompt.tools or "null"),
            json.loads(prompt.template_kwargs or "{}"),
            {name: getattr(prompt, name) for name in names},
        )

    def changed(self, client: Callable[[str], str], answer: Callable[[str], str]) -> Chat:
        """Return a copy with the contents and the reasoning of answers changed by `answer`. All other strings and keys
        of the client are changed by `client`."""
        own = {"role": _same, "content": answer, "reasoning_content": answer}
        others = {"role": _same}
        messages = [
            {
                name: _with_strings(
                    value, (own if message["role"] == "assistant" else others).get(name, client)
                )
                for name, value in message.items()
            }
            for message in self.messages
        ]
        return replace(
            self,
            messages=messages,
            tools=_with_strings(self.tools, client),
            kwargs={name: _with_strings(value, client) for name, value in self.kwargs.items()},
        )


def _same(text: str) -> str:
    return text


def _template_message(message: ChatMessage, *, has_objects: bool) -> dict[str, Any]:
    """Return a message as chat templates take it."""
    calls = json.loads(message.tool_calls or "[]")
    fields = {
        "name": message.name,
        "tool_calls": [_template_call(call) for call in calls] if has_objects else calls,
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
            return change(value)
        case list():
            return [_with_strings(item, change) for item in value]
        case dict():
            return {change(key): _with_strings(item, change) for key, item in value.items()}
        case _:
            return value


def check_messages(messages: Sequence[ChatMessage]) -> None:
    if not messages:
        raise PromptError("the chat has no messages")
    if any(message.role not in ROLES for message in messages):
        raise PromptError("a message's role must be system, user, assistant or tool")
