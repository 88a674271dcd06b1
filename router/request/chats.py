"""Checks of chats: their messages, tools and template variables.

Pure. Does not own the chat template, which the tokenizer process applies (tokenizing/), or the bytes of all texts
(prompts.py).
"""

import json

from blockyard.proto.limits import MAX_SCHEMA_DEPTH, MAX_TOOLS
from blockyard.proto.naming.identifiers import is_variable
from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import FieldViolation, InvalidRequest, Unsupported
from blockyard.router.request.structured_output import is_deeper_than, parse_json
from blockyard.router.tokenizing.service import ChatMessage, ChatPrompt

MAX_MESSAGES = 1024
MAX_NAME_CHARS = 256
"""Most characters of the name in a chat message."""
MAX_TEMPLATE_KWARGS_BYTES = 16_384
MAX_TEMPLATE_KWARGS_DEPTH = 16
ROLES = frozenset({"system", "user", "assistant", "tool"})
MAX_TOOLS_BYTES = 262_144


def valid_chat(chat: inference_pb2.Chat) -> ChatPrompt:
    if not chat.messages:
        raise InvalidRequest.of("chat.messages", "must not be empty")
    if len(chat.messages) > MAX_MESSAGES:
        raise InvalidRequest.of("chat.messages", f"at most {MAX_MESSAGES} are allowed")
    if any(message.media for message in chat.messages):
        raise Unsupported.of("chat.messages.media", "is not supported yet")
    violations = []
    if any(message.role not in ROLES for message in chat.messages):
        description = "must be system, user, assistant or tool"
        violations.append(FieldViolation(field="chat.messages.role", description=description))
    if all(message.role == "assistant" for message in chat.messages):
        description = "needs a message of another role than assistant"
        violations.append(FieldViolation(field="chat.messages", description=description))
    if any(
        message.HasField("name") and not 1 <= len(message.name) <= MAX_NAME_CHARS for message in chat.messages
    ):
        description = f"must have 1 to {MAX_NAME_CHARS} characters"
        violations.append(FieldViolation(field="chat.messages.name", description=description))
    for field, problem in (
        ("chat.template_kwargs", _template_kwargs_problem(chat.template_kwargs)),
        ("chat.continue_final_message", _continuation_problem(chat)),
        ("chat.tools", _tools_problem(chat.tools, "name")),
        *(
            ("chat.messages.tool_calls", _tools_problem(message.tool_calls, "arguments"))
            for message in chat.messages
            if message.tool_calls
        ),
    ):
        if problem is not None:
            violations.append(FieldViolation(field=field, description=problem))
    if violations:
        raise InvalidRequest.of_all(violations)
    continues = chat.continue_final_message
    return ChatPrompt(
        [
            ChatMessage(
                message.role,
                message.content,
                message.name,
                tool_calls=message.tool_calls,
                tool_call_id=message.tool_call_id,
                reasoning=message.reasoning_content,
            )
            for message in chat.messages
        ],
        tools=chat.tools,
        template_kwargs=chat.template_kwargs,
        add_generation_prompt=(
            chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continues
        ),
        continue_final_message=continues,
    )


def _tools_problem(text: str, required: str) -> str | None:
    """Return what is wrong with a JSON list of tools or calls, or None. Each must have a function with the text
    `required`."""
    if not text:
        return None
    tools, problem = _read_json(text, most_bytes=MAX_TOOLS_BYTES, most_levels=MAX_SCHEMA_DEPTH)
    if problem is not None:
        return problem
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        return f"must be a list of 1 to {MAX_TOOLS}"
    functions = [tool.get("function") if isinstance(tool, dict) else None for tool in tools]
    if not all(isinstance(one, dict) and isinstance(one.get(required), str) for one in functions):
        return f"each must have a function with the text `{required}`"
    return None


def _template_kwargs_problem(text: str) -> str | None:
    """Return what is wrong with the template's variables, or None. The tokenizer process checks their names."""
    if not text:
        return None
    kwargs, problem = _read_json(
        text, most_bytes=MAX_TEMPLATE_KWARGS_BYTES, most_levels=MAX_TEMPLATE_KWARGS_DEPTH
    )
    if problem is not None:
        return problem
    if not isinstance(kwargs, dict) or not all(map(is_variable, kwargs)):
        return "must be an object with names of variables"
    return None


def _read_json(text: str, *, most_bytes: int, most_levels: int) -> tuple[object, str | None]:
    """Return the value of a JSON text, and what is wrong with the text, or None."""
    too_deep = f"must not be nested deeper than {most_levels} levels"
    if len(text) > most_bytes or len(text.encode()) > most_bytes:
        return None, f"at most {most_bytes} bytes of JSON are allowed"
    try:
        value = parse_json(text)
        # JSON can spell a lone surrogate, which is not a character.
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        return None, too_deep
    except ValueError:
        return None, "must be JSON"
    return value, too_deep if is_deeper_than(value, most_levels) else None


def _continuation_problem(chat: inference_pb2.Chat) -> str | None:
    if not chat.continue_final_message:
        return None
    if chat.add_generation_prompt:
        return "excludes add_generation_prompt"
    return None if chat.messages[-1].role == "assistant" else "needs a last message of the role assistant"
