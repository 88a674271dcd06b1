"""Responses by property: items and messages, the events of any way of cutting an output, pages, and what is kept."""

import json
from typing import Any

import pytest
from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import RouterError
from blockyard.router.generation.client_buffer import Delta
from blockyard.router.openai.requests.wanted import Wanted
from blockyard.router.openai.responses.items import Surroundings, chat_messages, read_input
from blockyard.router.openai.responses.output import EventWriter, OutputForm
from blockyard.router.openai.responses.read_output import ReadOutput
from blockyard.router.openai.responses.request import read_request
from blockyard.router.openai.responses.stored import page_of
from blockyard.router.parsing.formats import HERMES, THINK, AnswerFormat
from blockyard.router.parsing.reading import Reading
from blockyard.router.sealed_records import KeptRecords, RecordName, TextSeal
from hypothesis import given
from hypothesis import strategies as st

from .rig import CALL, EVENT, told

FORMAT = AnswerFormat(tools=HERMES, reasoning=THINK)
ALONE = Surroundings(response_id="resp_" + "0" * 48)
FORM = OutputForm(response_id=ALONE.response_id, num_before=0, has_summaries=True, sealed="sealed {}".format)
CUT = inference_pb2.Finish(reason=inference_pb2.FINISH_REASON_LENGTH)
PIECES = st.lists(
    st.sampled_from(["<think>", "Hm. ", "</think>", "Yes \U0001f327", CALL, "\n", "<tool_call>"]), max_size=8
)


def read(text: str, cuts: list[int]) -> tuple[ReadOutput, list[dict[str, Any]]]:
    """Return an output whose text came in the pieces between these places, and its events."""
    wanted = Wanted(
        requests=(inference_pb2.GenerateRequest(),),
        answering=None,  # type: ignore[arg-type]
        reading=Reading(format=FORMAT, tools={"get_weather": None}, reads_reasoning=True),
        names={},
    )
    output = ReadOutput(wanted, EventWriter(), FORM)
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    data = b""
    for number, (start, end) in enumerate(zip(places, places[1:] or [0], strict=False)):
        is_last = end == len(text)
        output.add(
            Delta(text=text[start:end], token_ids=[1], token_offset=number, finish=CUT if is_last else None)
        )
        data += output.told
    blocks = data.decode().removesuffix("\n\n").split("\n\n")
    return output, [json.loads(block.split("\ndata: ")[1]) for block in blocks]


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


@given(pieces=PIECES, cuts=st.lists(st.integers(1, 200)))
def test_items_are_the_same_for_every_way_of_cutting_and_their_events_add_up_to_them(
    pieces: list[str], cuts: list[int]
) -> None:
    text = "".join(pieces)
    whole, _ = read(text, [])
    output, events = read(text, cuts)
    assert without_ids(output.items) == without_ids(whole.items)
    assert output.items, "an output without text is an empty message"
    for event in events:
        EVENT.validate_python(event, strict=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    ended = told(events)
    texts = [item["text"] for item in ended]
    for item in output.items:
        if item["type"] == "reasoning":
            (part,) = item["content"]
            assert item["summary"] == [{"type": "summary_text", "text": part["text"]}]
            assert item["encrypted_content"] == f"sealed {part['text']}"
    assert texts == [
        item.get("arguments") or "".join(part["text"] for part in item.get("content", ()))
        for item in output.items
    ]
    assert [item["status"] for item in output.items] == ["completed"] * (len(texts) - 1) + ["incomplete"]
    usage = output.usage()
    assert 0 <= usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"]


@pytest.mark.parametrize(
    ("text", "reasoning"), [("Yes.", 0), ("<think>Hm.</think>", 10), ("<think>Hm.</think>Yes", 10)]
)
def test_reasoning_tokens_are_those_whose_text_is_reasoning(text: str, reasoning: int) -> None:
    """One character is a token here. The end mark counts with what follows it."""
    output, _ = read(text, list(range(1, len(text))))
    assert output.usage()["output_tokens_details"]["reasoning_tokens"] == reasoning


def call_of(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}


def output_of(call_id: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def texts(kind: str, *said: str) -> list[dict[str, str]]:
    return [{"type": kind, "text": text} for text in said]


def test_items_of_one_answer_become_one_message_and_a_new_answer_another() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": texts("reasoning_text", "Hm.")}
    items = read_input(
        "input",
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": texts("input_text", "a", "b")},
            thought,
            {"type": "message", "role": "assistant", "content": texts("output_text", "I look.")},
            *(call_of("c1"), call_of("c2"), output_of("c1", "1"), output_of("c2", texts("input_text", "2"))),
            *(call_of("c3"), output_of("c3", "3")),
            {"role": "assistant", "content": "Yes."},
            {"role": "assistant", "content": "No."},
        ],
        ALONE,
    )
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": f"c{number}", "type": "function", "function": function} for number in (1, 2, 3)]
    assert chat_messages(items) == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls[:2]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "content": None, "tool_calls": calls[2:]},
        {"role": "tool", "tool_call_id": "c3", "content": "3"},
        {"role": "assistant", "content": "Yes."},
        {"role": "assistant", "content": "No."},
    ]
    assert read_input("input", items, ALONE) == items, "what is listed can be sent back"


@pytest.mark.parametrize("before", ["", "I look."])
@pytest.mark.parametrize("after", ["", "And on."])
def test_text_behind_calls_stays_in_their_message_so_that_results_can_follow(before: str, after: str) -> None:
    said = [{"role": "user", "content": "a"}, *([{"role": "assistant", "content": before}] if before else [])]
    said += [call_of("c1"), {"role": "assistant", "content": after}, call_of("c2")]
    items = read_input("input", [*said, output_of("c1", "1"), output_of("c2", "2")], ALONE)
    user, answer, *results = chat_messages(items)
    assert (user["role"], answer["role"], answer["content"]) == ("user", "assistant", before + after or None)
    ids = [one["id"] for one in answer["tool_calls"]]
    assert ids == [one["tool_call_id"] for one in results] == ["c1", "c2"]
    wanted = read_request({"input": items}).wanted(items, FORMAT, can_store=True, can_seal=True)
    chat = wanted.requests[0].chat
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "tool"]


KEYS = (
    *("type", "role", "content", "id", "call_id", "name", "arguments", "output", "summary", "text", "tools"),
    *("mode", "format", "schema", "strict", "description", "parameters", "effort", "verbosity"),
)
WORDS = st.sampled_from(["message", "reasoning", "function", "json_object", "json_schema", "\ud800"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=12,
)
FIELD = st.sampled_from(
    [
        *("input", "tools", "tool_choice", "text", "reasoning", "include", "metadata", "stream_options"),
        *("truncation", "store"),
    ]
)


@given(field=FIELD, value=JSON)
def test_any_json_is_answered_or_refused_by_name(field: str, value: Any) -> None:
    body = {"input": "x", "stream": True, field: value}
    refused = None
    try:
        request = read_request(body)
        wanted = request.wanted(request.items(ALONE), FORMAT, can_store=True, can_seal=True)
    except RouterError as error:
        refused = error
    if refused is not None:
        assert [violation.field.startswith(field) for violation in refused.violations] == [True], refused
        return
    json.dumps(request.echo(), ensure_ascii=False, allow_nan=False).encode()
    assert wanted.requests[0].chat.messages


@pytest.mark.parametrize(
    ("included", "can_seal", "ignored"),
    [
        (["reasoning.encrypted_content"], True, ()),
        (["reasoning.encrypted_content"], False, ("include",)),
        (["reasoning.encrypted_content", "file_search_call.results"], True, ("include",)),
    ],
)
def test_what_is_included_is_ignored_by_name_where_it_has_no_effect(
    included: list[str], can_seal: bool, ignored: tuple[str, ...]
) -> None:
    request = read_request({"input": "x", "include": included})
    wanted = request.wanted(request.items(ALONE), FORMAT, can_store=True, can_seal=can_seal)
    assert wanted.answering.ignored == ignored


ITEMS = [{"id": f"msg_{number}", "type": "message"} for number in range(7)]


@given(limit=st.integers(1, 9), order=st.sampled_from(["asc", "desc"]))
def test_pages_list_every_item_once_in_order(limit: int, order: str) -> None:
    found: list[Any] = []
    query = {"limit": str(limit), "order": order}
    while True:
        page = page_of(ITEMS, query)
        found += page["data"]
        assert len(page["data"]) <= limit
        if not page["has_more"]:
            break
        query["after"] = page["last_id"]
    assert found == (ITEMS if order == "asc" else ITEMS[::-1])


@given(writes=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 5)), max_size=40))
def test_a_router_keeps_a_bounded_number_of_bytes_and_drops_the_oldest(writes: list[tuple[int, int]]) -> None:
    kept, alive, now = KeptRecords(100, 20), dict[str, tuple[int, int]](), 0
    for number, (size, wait) in enumerate(writes):
        now += wait
        name = RecordName(kind="x", tenant="t", record_id=str(number))
        alive[str(number)] = (now, size)
        dropped = [one.record_id for one in kept.add(name, size, now)]
        expired = [one for one, (written, _) in alive.items() if now - written >= 20]
        assert not set(dropped) & set(expired)
        alive = {one: facts for one, facts in alive.items() if one not in {*dropped, *expired}}
        assert kept.num_bytes == sum(size for _, size in alive.values()) <= 100
        if dropped:
            assert max(map(int, dropped)) < min(map(int, alive))
            assert kept.num_bytes + int(writes[int(dropped[-1])][0]) > 100, "no more than must be"


@given(
    text=st.text(max_size=40),
    place=st.integers(0, 200),
    put=st.sampled_from(["", "A", "+", "-", "=", "\n", "é"]),
)
def test_a_seal_opens_its_texts_for_their_tenant_and_nothing_that_was_changed(
    text: str, place: int, put: str
) -> None:
    seal, another, foreign = (
        TextSeal.of(tenant, kind="reasoning", cluster="c", secret=secret)
        for tenant, secret in (("acme", "s"), ("bravo", "s"), ("acme", "t"))
    )
    sealed = seal.sealed(text)
    assert seal.opened(sealed) == text
    place %= len(sealed)
    changed = sealed[:place] + put + sealed[place + 1 :]
    assert changed == sealed or seal.opened(changed) is None
    assert another.opened(sealed) is foreign.opened(sealed) is None
    assert seal.sealed(text) != sealed
