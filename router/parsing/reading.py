"""Reading: how the outputs of one chat are parsed, and the parser of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockyard.router.parsing.events import AnswerParser
from blockyard.router.parsing.formats import AnswerFormat, PromptEnd
from blockyard.router.parsing.template_parser import TemplateParser
from blockyard.router.parsing.text_parser import TextParser


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the outputs of one chat are parsed."""

    format: AnswerFormat
    tools: Mapping[str, Mapping[str, Any] | None]
    """JSON schemas of the tools that may be called, by name. Empty: calls stay text."""
    reads_reasoning: bool

    def parser(self, prompt_end: PromptEnd) -> AnswerParser:
        """Return a parser of one output of a prompt with this end."""
        if self.format.template is not None:
            return TemplateParser(self.format.template, self.tools, prompt_end.before + prompt_end.begun)
        reasoning = self.format.reasoning if self.reads_reasoning else None
        is_thinking, begun = self.format.is_thinking(prompt_end), prompt_end.begun
        if is_thinking and reasoning is not None:
            begun = begun.rpartition(reasoning.open)[2]
        return TextParser(self.format.tools, reasoning, self.tools, is_thinking=is_thinking, begun=begun)
