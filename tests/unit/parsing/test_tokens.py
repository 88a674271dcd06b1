"""Parsing behind a real tokenizer, token by token: characters in pieces, and marks that are special tokens."""

from collections.abc import Iterable

import pytest
from blockyard.proto.text import TextOutput, load_tokenizer
from blockyard.router.parsing.choice import answer_format
from blockyard.router.parsing.events import Arguments, CallBegun, Event, Said, Thought, merged
from blockyard.router.parsing.formats import NO_END
from blockyard.router.parsing.reading import Reading

from tests.unit.router.rig import MODEL

ARGUMENTS = '{"city": "Zürich 🌧️ 東京"}'
TEMPLATES = {
    "mistral": (
        "{% if tools %}[TOOL_CALLS]name[ARGS]{% endif %}[THINK][/THINK]",
        f"[THINK]Höm 🌧[/THINK]Sö 東.[TOOL_CALLS]look[ARGS]{ARGUMENTS}",
    ),
    "llama3": (
        "{% if tools %}{% endif %}{{ '\"parameters\"' }}</think>",
        f'<think>Höm 🌧</think>Sö 東.<|python_tag|>{{"name": "look", "parameters": {ARGUMENTS}}}',
    ),
    "hermes": (
        "{% if tools %}<tool_call>{% endif %}</think>",
        f'<think>Höm 🌧</think>Sö 東.<tool_call>{{"name": "look", "arguments": {ARGUMENTS}}}</tool_call>',
    ),
}
MARKS = "[TOOL_CALLS] [ARGS] [THINK] [/THINK] <|python_tag|> <think> </think> <tool_call>"


def pieces(tokens: list[int], size: int) -> Iterable[list[int]]:
    return (tokens[at : at + size] for at in range(0, len(tokens), size))


@pytest.mark.parametrize("are_tokens", [True, False])
@pytest.mark.parametrize("family", TEMPLATES)
def test_an_answer_is_parsed_the_same_in_steps_of_any_number_of_tokens(family: str, are_tokens: bool) -> None:
    tokenizer = load_tokenizer(MODEL)
    tokenizer.chat_template, text = TEMPLATES[family]
    special = [*MARKS.split(), "</tool_call>", "<|elsewhere|>"]
    if are_tokens or family == "llama3":
        tokenizer.add_special_tokens({"additional_special_tokens": special})
    hidden = tokenizer.encode("<|im_start|>") + (tokenizer.encode("<|elsewhere|>") if are_tokens else [])
    tokens = tokenizer.encode(text) + hidden
    reading = Reading(format=answer_format(tokenizer), tools={"look": None}, reads_reasoning=True)
    expected: list[Event] = [Thought("Höm 🌧"), Said("Sö 東."), CallBegun("look"), Arguments(ARGUMENTS)]
    for size in (1, 2, 3, 7, len(tokens)):
        output = TextOutput(tokenizer, stop=(), min_tokens=0, shown=reading.format.shown_tokens)
        parser = reading.parser(NO_END)
        events: list[Event] = []
        for piece in pieces(tokens, size):
            events += parser.push(output.push(piece, is_last=False).text)
        events += parser.push(output.push([], is_last=True).text)
        assert merged([*events, *parser.finish()]) == expected
