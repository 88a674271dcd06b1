"""A chunk cut from a template is the same as one made whole."""

from typing import Any, cast

import pytest
from blockyard.proto.v1 import inference_pb2
from blockyard.router.generation.client_buffer import Delta
from blockyard.router.openai.answers.choices import Route, choices_of
from blockyard.router.openai.answers.envelope import Chunks, Envelope
from blockyard.router.openai.answers.face import Head
from blockyard.router.openai.answers.tally import Tally
from blockyard.router.openai.http.json_response import encoded
from blockyard.router.openai.requests.chat import chat_wanted
from blockyard.router.openai.requests.completion import completion_wanted
from blockyard.router.tokenizing.token_texts import TokenTexts
from hypothesis import given
from hypothesis import strategies as st

OPTIONS: list[dict[str, Any]] = [
    {},
    {"return_token_ids": True},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]
TEXTS = st.lists(st.tuples(st.integers(0, 1), st.text(max_size=5)), max_size=20)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("is_chat", [True, False])
@given(texts=TEXTS)
def test_each_chunk_of_a_stream_is_what_the_envelope_makes(
    texts: list[tuple[int, str]], is_chat: bool, options: dict[str, Any]
) -> None:
    body = {"model": "m", "n": 2, "stream": True, **options}
    if is_chat:
        wanted = chat_wanted(body | {"messages": [{"role": "user", "content": "hi"}]})
    else:
        wanted = completion_wanted(body | {"prompt": "hi"})
    route: Route = "chat" if is_chat else "completions"
    envelope = Envelope(route=route, wanted=wanted, head=Head(request_id="r", model="m", created=1))
    no_texts = cast(TokenTexts, None)
    chunks = Chunks(envelope=envelope, choices=choices_of(route, wanted, no_texts), tally=Tally(2))
    choices, tally = choices_of(route, wanted, no_texts), Tally(2)
    finish = inference_pb2.Finish(reason=inference_pb2.FINISH_REASON_LENGTH)
    pieces = [(index, text, None) for index, text in texts] + [(index, "end", finish) for index in (0, 1)]
    for number, (index, text, end) in enumerate(pieces):
        delta = Delta(
            text=text,
            token_ids=[number] * (number % 3),
            token_offset=0,
            index=index,
            finish=end,
            prompt_tokens=9,
        )
        tally.add(delta)
        chunk = envelope.chunk(choices.piece(delta, choices.said(delta, "")), delta, tally)
        assert chunks.events(delta) == b"data: " + encoded(chunk) + b"\n\n"
