"""Formats in which models write tool calls and reasoning. Pure data.

The formats of calls are those for which most open models are trained. A tokenizer with a response template of its own
has another format (template_parser.py).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from blockyard.proto.v1 import inference_pb2

ToolParser = Literal["auto", "none", "hermes", "llama3", "mistral", "template"]
"""Format of tool calls. `template` is the tokenizer's own response template."""
ReasoningParser = Literal["auto", "none", "think", "mistral"]

THINKING_VARIABLES = ("enable_thinking", "reasoning_effort")
"""Variables of chat templates that decide whether, and how much, a model reasons."""
ARGUMENT_KEYS = ("arguments", "parameters")
"""Keys under which models write a call's arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Format of calls: `open`, a JSON object with name and arguments, `close`. Texts that are not there are empty."""

    open: str
    close: str = ""
    is_bare: bool = False
    """An object at the start of the output, or after another call, is a call without `open`."""
    arguments_key: str = "arguments"
    """Key of the arguments in calls that a grammar forces."""
    name_end: str = ""
    """Text between a name and bare arguments, in calls that a grammar forces. Empty: these calls are objects."""
    begin: str
    separator: str
    end: str = ""
    """Texts around and between the calls that a grammar forces."""
    has_names: bool = False
    """After `open` a name and bare arguments may come instead of an object."""
    short_ids: bool = False
    """Ids of calls have 9 letters and digits, as Mistral's templates demand."""

    def around(self, name: str) -> tuple[str, str]:
        """Return the texts before and after the arguments of a call that a grammar forces."""
        if self.name_end:
            return name + self.name_end, ""
        return f'{{"name": {json.dumps(name)}, "{self.arguments_key}": ', "}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    open: str
    close: str


HERMES = ToolFormat(
    open="<tool_call>",
    close="</tool_call>",
    begin="<tool_call>\n",
    separator="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
)
"""Hermes and Qwen."""
LLAMA3 = ToolFormat(open="<|python_tag|>", is_bare=True, arguments_key="parameters", begin="", separator="; ")
MISTRAL_LIST = ToolFormat(
    open="[TOOL_CALLS]", begin="[TOOL_CALLS][", separator=", ", end="]", has_names=True, short_ids=True
)
"""Mistral's tokenizers up to version 7: a list of objects."""
MISTRAL_NAMED = ToolFormat(
    open="[TOOL_CALLS]",
    name_end="[ARGS]",
    begin="[TOOL_CALLS]",
    separator="[TOOL_CALLS]",
    has_names=True,
    short_ids=True,
)
"""Mistral's tokenizers from version 11 on: each call has a mark of its own, a name and bare arguments."""
THINK = ReasoningFormat(open="<think>", close="</think>")
MISTRAL_THINK = ReasoningFormat(open="[THINK]", close="[/THINK]")


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """The prompt's last text, where the answer begins."""

    before: str = ""
    """The text before the answer."""
    begun: str = ""
    """The answer's text in the prompt, which the model continues."""

    def __bool__(self) -> bool:
        return bool(self.before or self.begun)


NO_END = PromptEnd()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """Format of one model's answers."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    template: Mapping[str, Any] | None = None
    """The tokenizer's response template, which replaces both."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Texts of the formats that are single tokens of the model, with their ids."""
    variables: frozenset[str] = frozenset()
    """Names in THINKING_VARIABLES that the chat template takes."""

    @property
    def tags(self) -> list[str]:
        """Return the texts around reasoning and calls. Empty for a response template."""
        tags = [] if self.tools is None else [self.tools.open, self.tools.close, self.tools.name_end]
        tags += [] if self.reasoning is None else [self.reasoning.open, self.reasoning.close]
        return list(filter(None, tags))

    @property
    def reads_tools(self) -> bool:
        """Return whether calls of tools can be read."""
        return self.tools is not None or self.template is not None

    @property
    def reads_reasoning(self) -> bool:
        """Return whether reasoning can be read."""
        return self.reasoning is not None or self.template is not None

    @property
    def shown_tokens(self) -> frozenset[int]:
        """Return the tokens whose text the parser needs, even if they are special tokens."""
        return frozenset(self.tokens.values())

    def is_thinking(self, prompt_end: PromptEnd) -> bool:
        """Return whether a prompt ends within the reasoning. Some chat templates begin it, and so may a client that
        begins the answer."""
        if self.reasoning is None:
            return False
        if not prompt_end.begun:
            return prompt_end.before.rstrip().endswith(self.reasoning.open)
        return prompt_end.begun.rfind(self.reasoning.open) > prompt_end.begun.rfind(self.reasoning.close)

    def grammar(
        self, schemas: Mapping[str, str], *, allows_many: bool, allows_text: bool
    ) -> inference_pb2.ToolCallGrammar | None:
        """Return the grammar of calls of these tools, by name, or None if the model's format is not known."""
        if self.tools is None:
            return None
        grammar = inference_pb2.ToolCallGrammar(
            begin=self.tools.begin,
            separator=self.tools.separator,
            end=self.tools.end,
            allows_many=allows_many,
            allows_text=allows_text,
            think_open="" if self.reasoning is None else self.reasoning.open,
            think_close="" if self.reasoning is None else self.reasoning.close,
            tokens=self.tokens,
        )
        for name, schema in schemas.items():
            before, after = self.tools.around(name)
            grammar.tools.add(before=before, schema=schema, after=after)
        return grammar


NO_FORMAT = AnswerFormat()
"""Format of a model whose answers are text alone."""
