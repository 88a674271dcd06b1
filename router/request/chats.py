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
    if len(text) > MAX_TOOLS_BYTES or len(text.encode()) > MAX_TOOLS_BYTES:
        return f"at most {MAX_TOOLS_BYTES} bytes of JSON are allowed"
    try:
        tools = parse_json(text)
        # JSON can spell a lone surrogate, which is not a character.
        json.dumps(tools, ensure_ascii=False).encode()
    except RecursionError:
        return f"must not be nested deeper than {MAX_SCHEMA_DEPTH} levels"
    except ValueError:
        return "must be JSON"
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        return f"must be a list of 1 to {MAX_TOOLS}"
    functions = [tool.get("function") if isinstance(tool, dict) else None for tool in tools]
    if not all(isinstance(one, dict) and isinstance(one.get(required), str) for one in functions):
        return f"each must have a function with the text `{required}`"
    if is_deeper_than(tools, MAX_SCHEMA_DEPTH):
        return f"must not be nested deeper than {MAX_SCHEMA_DEPTH} levels"
    return None


def _template_kwargs_problem(text: str) -> str | None:
    """Return what is wrong with the template's variables, or None. The tokenizer process checks their names."""
    if not text:
        return None
    if len(text) > MAX_TEMPLATE_KWARGS_BYTES or len(text.encode()) > MAX_TEMPLATE_KWARGS_BYTES:
        return f"at most {MAX_TEMPLATE_KWARGS_BYTES} bytes of JSON are allowed"
    try:
        kwargs = parse_json(text)
        # JSON can spell a lone surrogate, which is not a character.
        json.dumps(kwargs, ensure_ascii=False).encode()
    except RecursionError:
        return f"must not be nested deeper than {MAX_TEMPLATE_KWARGS_DEPTH} levels"
    except ValueError:
        return "must be JSON"
    if not isinstance(kwargs, dict) or not all(map(is_variable, kwargs)):
        return "must be an object with names of variables"
    if is_deeper_than(kwargs, MAX_TEMPLATE_KWARGS_DEPTH):
        return f"must not be nested deeper than {MAX_TEMPLATE_KWARGS_DEPTH} levels"
    return None


def _continuation_problem(chat: inference_pb2.Chat) -> str | None:
    if not chat.continue_final_message:
        return None
    if chat.add_generation_prompt:
        return "excludes add_generation_prompt"
    return None if chat.messages[-1].role == "assistant" else "needs a last message of the role assistant"
