"""Blocks of Anthropic's answers: those that a stream adds up to are those of the whole answer, however it was cut."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from blockyard.router.openai.answers.answer_text import ParsedOutput
from blockyard.router.openai.anthropic.blocks import Blocks
from blockyard.router.parsing.formats import HERMES, LLAMA3, MISTRAL_LIST, THINK, AnswerFormat, PromptEnd
from blockyard.router.parsing.reading import Reading
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
START = {
    "type": "message_start",
    "message": {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 0},
    },
}
CALL = (
    '<tool_call>\n{"name": "add", "arguments": {"a": [1, {"b": "</tool_call> 🌧 \\" \\u00fc"}]}}\n</tool_call>'
)
CASES = {
    "text": (HERMES, "Hello <b>there</b>.\n"),
    "nothing": (HERMES, ""),
    "thinking": (HERMES, "<think>Hm, <tool_call>.</think>\n\nYes."),
    "all": (HERMES, f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}\nSee."),
    "no call": (HERMES, CALL.replace('"add"', '"remove"')),
    "bare": (LLAMA3, '{"name": "add", "parameters": {}}; {"name": "add", "parameters": {"a": 1}}'),
    "list": (MISTRAL_LIST, '[TOOL_CALLS][{"name": "add", "arguments": {"x": []}}]'),
}


def new_blocks(case: str, prompt_end: str = "") -> Blocks:
    answers = AnswerFormat(tools=CASES[case][0], reasoning=THINK)
    reading = Reading(format=answers, tools={"add": {"type": "object"}}, reads_reasoning=True)
    return Blocks(ParsedOutput(reading, PromptEnd(prompt_end)))


def without_ids(blocks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


def accumulated(streamed: bytes) -> list[dict[str, Any]]:
    """Return the blocks as Anthropic's client adds them up, after each event was checked by its types."""
    snapshot, buffers = None, dict[int, bytes]()
    for event in [
        START,
        *(json.loads(line[6:]) for line in streamed.decode().split("\n") if line[:5] == "data:"),
    ]:
        parsed = EVENTS.validate_python(event, strict=True)
        snapshot = accumulate_event(event=parsed, current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    return [block.to_dict() for block in snapshot.content]


@pytest.mark.parametrize("case", CASES)
@given(data=st.data())
def test_the_blocks_of_a_stream_are_those_of_the_whole_however_it_is_cut(
    case: str, data: st.DataObject
) -> None:
    text = CASES[case][1]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    blocks = new_blocks(case)
    streamed = b"".join(
        blocks.streamed(piece, is_last=number == len(pieces) - 1) for number, piece in enumerate(pieces)
    )
    whole = new_blocks(case)
    expected = whole.whole(text)
    assert without_ids(accumulated(streamed)) == without_ids(expected)
    assert blocks.has_called is whole.has_called is any(block["type"] == "tool_use" for block in expected)


def test_blocks_come_in_the_order_of_the_text() -> None:
    blocks = new_blocks("all").whole(CASES["all"][1])
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use", "text"]


@pytest.mark.parametrize("arguments", ['{"a": 1e999}', '{"a": "\\ud800"}', '{"a": [', "[1]", "{" * 3000])
def test_arguments_that_json_cannot_carry_are_an_empty_input(arguments: str) -> None:
    text = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    for block in new_blocks("all").whole(text):
        json.dumps(block, allow_nan=False).encode()
        assert block.get("input", {}) == {}
