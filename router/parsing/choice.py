"""Choice of a model's answer format, from its chat template and tokens. Pure.

The name of a model says little: a fine-tuned model keeps its base's name and has another template.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from blockyard.router.parsing.formats import (
    HERMES,
    LLAMA3,
    MISTRAL_LIST,
    MISTRAL_NAMED,
    MISTRAL_THINK,
    THINK,
    THINKING_VARIABLES,
    AnswerFormat,
    ReasoningFormat,
    ReasoningParser,
    ToolFormat,
    ToolParser,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_XML_CALL = "<function="
"""Calls of Qwen3-Coder have Hermes' tags, but no JSON in them."""


def answer_format(
    tokenizer: "PreTrainedTokenizerBase",
    tool_parser: ToolParser = "auto",
    reasoning_parser: ReasoningParser = "auto",
) -> AnswerFormat:
    """Return the format of a tokenizer's model. Raises ValueError for `template` if the tokenizer has none."""
    template = getattr(tokenizer, "response_template", None)
    if tool_parser == "template" and template is None:
        raise ValueError("--tool-parser template: the model's tokenizer has no response template")
    return chosen_format(
        chat_template=str(tokenizer.chat_template or ""),
        added_tokens={token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items()},
        response_template=template,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
    )


def chosen_format(
    *,
    chat_template: str,
    added_tokens: Mapping[str, int],
    response_template: Mapping[str, Any] | None = None,
    tool_parser: ToolParser = "auto",
    reasoning_parser: ReasoningParser = "auto",
) -> AnswerFormat:
    """Return the format of a model with this chat template and these added tokens, by their ids."""
    variables = frozenset(name for name in THINKING_VARIABLES if name in chat_template)
    if response_template is not None and tool_parser in ("auto", "template"):
        # The template itself says which texts it needs, but not as a list: all tokens that it may mean are shown.
        named = str(response_template)
        tokens = {text: token_id for text, token_id in added_tokens.items() if text in named}
        return AnswerFormat(template=response_template, tokens=tokens, variables=variables)
    tools = _tools(tool_parser, chat_template, added_tokens)
    reasoning = _reasoning(reasoning_parser, chat_template, added_tokens)
    known = AnswerFormat(tools=tools, reasoning=reasoning, variables=variables)
    return replace(known, tokens={text: added_tokens[text] for text in known.tags if text in added_tokens})


def _tools(parser: ToolParser, template: str, added_tokens: Mapping[str, int]) -> ToolFormat | None:
    match parser:
        case "none" | "template":
            return None
        case "hermes":
            return HERMES
        case "llama3":
            return LLAMA3
        case "mistral":
            is_named = "[ARGS]" in template or "[ARGS]" in added_tokens
            return MISTRAL_NAMED if is_named else MISTRAL_LIST
        case "auto":
            pass
    if "tools" not in template:
        return None
    if MISTRAL_LIST.open in template:
        return _tools("mistral", template, added_tokens)
    if HERMES.open in template and _XML_CALL not in template:
        return HERMES
    if LLAMA3.open in added_tokens and '"parameters"' in template:
        return LLAMA3
    return None


def _reasoning(
    parser: ReasoningParser, template: str, added_tokens: Mapping[str, int]
) -> ReasoningFormat | None:
    match parser:
        case "none":
            return None
        case "think":
            return THINK
        case "mistral":
            return MISTRAL_THINK
        case "auto":
            pass
    for shown in (template, added_tokens):
        for known in (THINK, MISTRAL_THINK):
            if known.close in shown:
                return known
    return None
