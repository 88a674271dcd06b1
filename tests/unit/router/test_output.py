"""Output to a client: merged if it is slow, cut off if it stops reading, never split and never past a stop string."""

import asyncio
from typing import Any

import pytest
from blockyard.proto.text import TextOutput
from blockyard.proto.v1 import inference_pb2
from blockyard.router.admission.loop_budget import LoopBudget
from blockyard.router.errors import SlowReader, WorkerLost, as_router_error
from blockyard.router.generation.client_buffer import Delta, Emit, Outbox, deliver
from hypothesis import given
from hypothesis import strategies as st


def delta(number: int) -> Delta:
    return Delta(text=f"{number} ", token_ids=[number], token_offset=number)


async def test_a_slow_reader_gets_fewer_and_larger_pieces_and_everything() -> None:
    outbox = Outbox()
    outbox.put(delta(0))
    first = await outbox.take()
    for number in range(1, 100):
        outbox.put(delta(number))
    outbox.end()
    rest = await outbox.take()
    assert first is not None
    assert rest is not None
    assert (first.token_ids, first.text) == ([0], "0 ")
    assert (rest.token_offset, rest.token_ids) == (1, list(range(1, 100)))
    assert rest.text == "".join(f"{number} " for number in range(1, 100))
    assert await outbox.take() is None


async def test_a_reader_who_takes_nothing_is_cut_off_and_the_source_is_closed() -> None:
    closed = asyncio.Event()

    async def endless(emit: Emit) -> None:
        try:
            for number in range(10**9):
                emit(delta(number))
                await asyncio.sleep(0.001)
        finally:
            closed.set()

    async def never(_: Delta) -> None:
        await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as group:
        await deliver(endless, never, slow_reader_seconds=0.05, budget=LoopBudget(1))
    assert isinstance(as_router_error(group.value), SlowReader)
    assert closed.is_set()


async def test_what_came_before_an_error_is_still_delivered() -> None:
    async def failing(emit: Emit) -> None:
        emit(delta(0))
        emit(delta(1))
        raise WorkerLost("gone")

    written: list[int] = []

    async def write(piece: Delta) -> None:
        await asyncio.sleep(0)
        written.extend(piece.token_ids)

    with pytest.raises(ExceptionGroup) as group:
        await deliver(failing, write, slow_reader_seconds=1.0, budget=LoopBudget(1))
    assert isinstance(as_router_error(group.value), WorkerLost)
    assert written == [0, 1]


@given(can_wait=st.lists(st.booleans(), max_size=30))
def test_what_is_written_at_once_never_overtakes_what_waits(can_wait: list[bool]) -> None:
    written: list[int] = []

    async def run(emit: Emit) -> None:
        for number, waits in enumerate(can_wait):
            emit(delta(number))
            if waits:
                await asyncio.sleep(0)

    async def write(piece: Delta) -> None:
        await asyncio.sleep(0)
        written.extend(piece.token_ids)

    def write_now(piece: Delta) -> bool:
        if piece.token_offset % 3 == 0:
            return False
        written.extend(piece.token_ids)
        return True

    asyncio.run(deliver(run, write, write_now=write_now, slow_reader_seconds=1.0, budget=LoopBudget(1)))
    assert written == list(range(len(can_wait)))


@given(data=st.data())
def test_the_text_ends_where_the_first_stop_string_begins(tokenizer: Any, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(300, 1300), min_size=1, max_size=40))
    whole = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    start = data.draw(st.integers(0, max(len(whole) - 1, 0)))
    stop = whole[start : start + data.draw(st.integers(1, 6))] or "never"
    sizes = data.draw(st.lists(st.integers(1, 7), min_size=40, max_size=40))
    output = TextOutput(tokenizer, stop=[stop], min_tokens=0)
    text, taken, position = "", 0, 0
    for size in sizes:
        run = tokens[position : position + size]
        position += size
        piece = output.push(run, is_last=position >= len(tokens))
        text, taken = text + piece.text, taken + len(piece.token_ids)
        if piece.stop is not None or position >= len(tokens):
            break
    found = whole.find(stop)
    assert text == (whole if found < 0 else whole[:found])
    if found >= 0:
        assert stop in tokenizer.decode(tokens[:taken], skip_special_tokens=True) or taken == len(tokens)


@given(data=st.data())
def test_an_outbox_merges_each_output_by_itself_and_loses_nothing(data: st.DataObject) -> None:
    num_outputs = data.draw(st.integers(1, 5))
    outbox = Outbox()
    put = [0] * num_outputs
    taken: list[list[int]] = [[] for _ in range(num_outputs)]
    shown = [""] * num_outputs
    finish = inference_pb2.Finish(reason=inference_pb2.FINISH_REASON_LENGTH)
    ended: set[int] = set()

    async def take_one() -> None:
        piece = await outbox.take()
        assert piece is not None
        assert piece.index not in ended, "a piece after the last one"
        if piece.finish is not None:
            assert piece.finish is finish
            ended.add(piece.index)
        assert piece.token_offset == len(taken[piece.index])
        assert [token.token_id for token in piece.logprobs] == piece.token_ids
        taken[piece.index] += piece.token_ids
        shown[piece.index] += piece.text

    async def play() -> None:
        for action in data.draw(st.lists(st.integers(-2, num_outputs - 1), max_size=60)):
            if action >= 0:
                token = put[action]
                piece = delta(token)
                piece.index, piece.logprobs = action, [inference_pb2.TokenLogprob(token_id=token)]
                outbox.put(piece)
                put[action] += 1
                assert len(outbox) <= num_outputs
            elif len(outbox):
                await take_one()
        for index in range(num_outputs):
            outbox.put(Delta(text="", token_ids=[], token_offset=put[index], index=index, finish=finish))
        while len(outbox):
            await take_one()

    asyncio.run(play())
    assert ended == {*range(num_outputs)}
    assert taken == [list(range(count)) for count in put]
    assert shown == ["".join(f"{token} " for token in range(count)) for count in put]


def test_a_merged_piece_keeps_the_prompts_logprobs_whichever_part_has_them() -> None:
    logprobs = [inference_pb2.TokenLogprob(token_id=7)]
    for number_with in (0, 1):
        parts = [delta(number) for number in range(3)]
        parts[number_with].prompt_logprobs = logprobs
        parts[0].merge(parts[1])
        parts[0].merge(parts[2])
        assert parts[0].prompt_logprobs == logprobs
        assert parts[0].token_ids == [0, 1, 2]


def pushed(output: TextOutput, tokens: list[int], size: int) -> str:
    """Push tokens in groups of a size until a stop string ends the text."""
    text = ""
    for start in range(0, len(tokens), size):
        piece = output.push(tokens[start : start + size], is_last=start + size >= len(tokens))
        text += piece.text
        if piece.stop is not None:
            break
    return text


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stop_string_is_shown_only_where_it_is_asked_for(tokenizer: Any, size: int) -> None:
    tokens = tokenizer.encode("first second third fourth", add_special_tokens=False)
    for include_stop, text in ((True, "first second third"), (False, "first second ")):
        output = TextOutput(tokenizer, stop=["third"], min_tokens=0, include_stop=include_stop)
        assert pushed(output, tokens, size) == text


def test_special_tokens_are_text_only_where_they_are_asked_for(tokenizer: Any) -> None:
    *tokens, last = tokenizer.encode("a<|im_start|> b<|im_end|>", add_special_tokens=False)
    for skip, include, text in (
        (True, True, "a b"),
        (False, False, "a<|im_start|> b"),
        (False, True, "a<|im_start|> b<|im_end|>"),
    ):
        output = TextOutput(tokenizer, stop=[], min_tokens=0, include_stop=include, skip_special=skip)
        pieces = [output.push([token], is_last=False) for token in tokens]
        pieces.append(output.push([last], is_last=True, stop_token=last))
        assert "".join(piece.text for piece in pieces) == text


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens(tokenizer: Any) -> None:
    tokens = tokenizer.encode("stop then stop again", add_special_tokens=False)
    output = TextOutput(tokenizer, stop=["stop"], min_tokens=len(tokens) // 2)
    piece = output.push(tokens, is_last=True)
    assert piece.stop == "stop"
    assert piece.text.startswith("stop then")
