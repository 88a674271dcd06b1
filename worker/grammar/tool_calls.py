"""Grammar of tool calls in a model's own format, as Lark text for the library. Pure.

Does not own the formats (the router's parsing/formats.py) or the limits (grammar.py).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from blockyard.proto.v1 import inference_pb2

_RULES = r"""
TEXT: /(.|\n)*/
NEWLINES: /\n{0,2}/
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """One tool's call: a text, arguments that follow the schema, a text."""

    before: str
    schema: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCalls:
    """ToolCallGrammar of the contract as a value. Its JSON text is the source of a Grammar."""

    tools: Sequence[ToolForm]
    begin: str
    separator: str
    end: str
    allows_many: bool
    allows_text: bool
    think_open: str
    think_close: str
    is_thinking: bool
    text_schema: str = ""
    tokens: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, message: inference_pb2.ToolCallGrammar) -> "ToolCalls":
        tools = [ToolForm(before=tool.before, schema=tool.schema, after=tool.after) for tool in message.tools]
        return cls(
            tools=tools,
            begin=message.begin,
            separator=message.separator,
            end=message.end,
            allows_many=message.allows_many,
            allows_text=message.allows_text,
            think_open=message.think_open,
            think_close=message.think_close,
            is_thinking=message.is_thinking,
            text_schema=message.text_schema,
            tokens=dict(sorted(message.tokens.items())),
        )

    @classmethod
    def from_source(cls, source: str) -> "ToolCalls":
        fields = json.loads(source)
        return cls(**{**fields, "tools": [ToolForm(**tool) for tool in fields["tools"]]})

    def source(self) -> str:
        return json.dumps(asdict(self))

    def lark(self, of_schema: Callable[[Any], str]) -> str:
        """Return the grammar as Lark text. `of_schema` prepares a schema for the library."""
        calls = " | ".join(f"call{number}" for number in range(len(self.tools)))
        rules = []
        for number, tool in enumerate(self.tools):
            arguments = of_schema(json.loads(tool.schema))
            rules.append(
                f"call{number}: {self._literal(tool.before)} {arguments} {self._literal(tool.after)}"
            )
        more = f"({self._literal(self.separator)} call)*" if self.allows_many else ""
        rules += [f"call: {calls}", f"rest: call {more} {self._literal(self.end)}"]
        text = of_schema(json.loads(self.text_schema)) if self.text_schema else ""
        rules += [*self._thought(), *self._body(text)]
        return "\n".join([*rules, _RULES])

    def _thought(self) -> list[str]:
        """Return the rule of the start: the body, after reasoning if the model may reason."""
        if not self.think_close:
            return ["start: body"]
        close = self._pieces(self.think_close)
        is_token = close[0].startswith("<")
        thought = f"TEXT {' '.join(close)}" if is_token else "thought_text"
        rules = [f"thought: {thought} NEWLINES"]
        if not is_token:
            rules.append(f"thought_text[suffix={json.dumps(self.think_close)}]: TEXT")
        before = "thought" if self.is_thinking else f"({self._literal(self.think_open)} thought)?"
        return [f"start: {before} body", *rules]

    def _body(self, text_schema: str) -> list[str]:
        """Return the rules of what follows the reasoning: calls, or text before and instead of them."""
        begin = self._pieces(self.begin)
        if text_schema or not self.allows_text:
            return [f"body: {' '.join(begin)} rest {'|' if text_schema else ''} {text_schema}"]
        if not begin:
            # Nothing marks a call, so any other text must begin with another character. A parser passes over spaces.
            first = "".join(re.escape(character) for character in sorted({t.before[:1] for t in self.tools}))
            return [
                "body: SPACE? rest | SPACE | OTHER?",
                "SPACE: /[ \\t\\r\\n]+/",
                f"OTHER: /[ \\t\\r\\n]*[^ \\t\\r\\n{first}](.|\\n)*/",
            ]
        if begin[0].startswith("<"):
            return [f"body: TEXT ({' '.join(begin)} rest)?"]
        # The library's own form of a trigger: the shortest text that ends with it.
        trigger = self.begin.rstrip()
        after = self._literal(self.begin[len(trigger) :])
        return [f"body: TEXT | trigger {after} rest", f"trigger[lazy]: TEXT {json.dumps(trigger)}"]

    def _literal(self, text: str) -> str:
        return " ".join(self._pieces(text))

    def _pieces(self, text: str) -> list[str]:
        """Return the text as literals and tokens of the library's grammar."""
        if not text:
            return []
        if not self.tokens:
            return [json.dumps(text, ensure_ascii=False)]
        marks = "|".join(re.escape(mark) for mark in sorted(self.tokens, key=len, reverse=True))
        return [
            f"<[{self.tokens[piece]}]>" if piece in self.tokens else json.dumps(piece, ensure_ascii=False)
            for piece in re.split(f"({marks})", text)
            if piece
        ]
