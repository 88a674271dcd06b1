"""Messages to the tokenizer process arrive unchanged, however their bytes are split."""

import io

import pytest
from blockyard.proto.naming.block_hash import NAME_BYTES, pack_tokens
from blockyard.router.parsing.formats import NO_END, PromptEnd
from blockyard.router.tokenizing.prompts import (
    ChatMessage,
    ChatPrompt,
    PromptError,
    PromptTooLong,
    TextPrompt,
    TokenPrompt,
)
from blockyard.router.tokenizing.wire import (
    Answer,
    Frames,
    Prepared,
    Question,
    TokenizingError,
    answer_frame,
    parse_answer,
    parse_question,
    question_frame,
    read_frame,
)
from hypothesis import given
from hypothesis import strategies as st

TEXTS = st.text()
PROMPTS = st.one_of(
    TEXTS.map(TextPrompt),
    st.builds(
        ChatPrompt,
        st.lists(st.builds(ChatMessage, TEXTS, TEXTS, TEXTS)),
        TEXTS,
        st.booleans(),
        st.booleans(),
    ),
    st.lists(st.integers(0, 2**31 - 1)).map(TokenPrompt),
)
ROOTS = st.none() | st.binary(min_size=NAME_BYTES, max_size=NAME_BYTES)
QUESTIONS = st.builds(
    Question,
    prompt=PROMPTS,
    root=ROOTS,
    block_size=st.integers(1, 256),
    max_tokens=st.none() | st.integers(1, 2**20),
    keep_last=st.none() | st.integers(1, 2**20),
    answers=st.none() | st.binary(max_size=40),
)


@given(st.lists(QUESTIONS, max_size=3))
def test_questions_arrive_as_they_were(questions: list[Question]) -> None:
    stream = io.BytesIO(b"".join(question_frame(question) for question in questions))
    arrived = []
    while (content := read_frame(stream)) is not None:
        arrived.append(parse_question(content))
    assert arrived == questions


@given(
    token_ids=st.lists(st.integers(0, 2**31 - 1)),
    names=st.binary(),
    piece=st.integers(1, 20),
    place=st.just(b"") | st.binary(min_size=24, max_size=24),
    end=st.just(NO_END) | st.builds(PromptEnd, st.text(), st.text()),
    is_guarded=st.booleans(),
)
def test_an_answer_arrives_whole_however_it_is_cut(token_ids, names, piece, place, end, is_guarded):
    answer = Prepared(
        token_ids=pack_tokens(token_ids),
        num_tokens=len(token_ids),
        block_names=names,
        place=place,
        num_spliced=len(token_ids) if place else 0,
        end=end,
        is_guarded=is_guarded,
    )
    sent = answer_frame(None) + answer_frame(answer)
    frames = Frames()
    cuts = (sent[at : at + piece] for at in range(0, len(sent), piece))
    contents = [content for cut in cuts for content in frames.push(cut)]
    assert [parse_answer(content) for content in contents] == [None, answer]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PromptError("of the client"), PromptError),
        (PromptTooLong("of the client"), PromptTooLong),
        (TokenizingError("ours"), TokenizingError),
        (FileNotFoundError(2, "no file"), OSError),
        (ValueError("no tokenizer"), ValueError),
        (KeyError("of a library"), ValueError),
    ],
)
def test_errors_arrive_as_their_kind_with_their_text(error: Answer, kind: type[Exception]) -> None:
    _, _, content = answer_frame(error).partition(b"{")
    arrived = parse_answer(b"{" + content)
    assert type(arrived) is kind
    assert str(arrived) == str(error)
