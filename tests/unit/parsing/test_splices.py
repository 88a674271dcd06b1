"""Prompts that repeat answers take the tokens that were sampled, on the templates of four families. A splice changes
neither a prompt's text nor what in it is a control token."""

import json
from collections.abc import Sequence

import pytest
from blockyard.proto.naming.block_hash import pack_tokens
from blockyard.router.tokenizing.prompts import ChatMessage, ChatPrompt, PromptError, TextPrompt
from blockyard.router.tokenizing.splices import (
    Answer,
    Call,
    pack_answer,
    place_of,
    placed,
    respelled,
    unpack_answers,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples

from .families import FAMILIES, Conversation, Family, num_common, other_tokens

BLOCK_SIZE = 16
SPACED = '{"path": "a.py", "lines": [1, 2]}'
COMPACT = '{"path":"a.py","lines":[1,2]}'
SAID = "def foo(bar):\n    return bar + 1  # naïve 😀, and then all of it once more in other words"
BY_NAME = {family.name: family for family in FAMILIES}
each_family = pytest.mark.parametrize("family", FAMILIES, ids=list(BY_NAME))


def call_text(family: Family, arguments: str) -> str:
    """Return a call as models of the family write it."""
    spaced = ": " in arguments
    head = '{"name": "read_file", "%s": ' if spaced else '{"name":"read_file","%s":'
    match family.name:
        case "llama3":
            return head % "parameters" + arguments + "}"
        case "mistral":
            return "[TOOL_CALLS] [" + head % "arguments" + arguments + "}]"
        case "mistral-named":
            return "[TOOL_CALLS]read_file[ARGS]" + arguments
        case _:
            return "<tool_call>\n" + head % "arguments" + arguments + "}\n</tool_call>"


def said_text(family: Family, text: str) -> str:
    return " " + text if family.has_metaspace else text


def reused(conversation: Conversation, answers: Sequence[Answer]) -> float:
    """Return the part of the last turn's full blocks that the next prompt finds again."""
    found = num_common(conversation.encode(answers).token_ids, conversation.cached)
    return (found // BLOCK_SIZE) / (len(conversation.cached) // BLOCK_SIZE)


def asked(name: str, seed: int = 3) -> Conversation:
    """Return a conversation in which the user has spoken."""
    talk = Conversation(BY_NAME[name], seed)
    talk.said("user", "Say it.")
    return talk


@each_family
@pytest.mark.parametrize("seed", range(3))
def test_every_block_of_three_answers_is_found_again(family: Family, seed: int) -> None:
    talk = Conversation(family, seed)
    plain = []
    for _ in range(3):
        talk.said("user", "Say it.")
        talk.answered(said_text(family, SAID))
        talk.said("user", "Go on.")
        plain.append(reused(talk, ()))
        assert reused(talk, talk.answers) == 1
        assert talk.encoder.decode(talk.encode(talk.answers).token_ids) == talk.encoder.decode(
            talk.encode(()).token_ids
        )
    assert min(plain) < 1, "the plain tokens are others"


@each_family
def test_a_call_as_the_template_spells_it_is_found_again(family: Family) -> None:
    talk = Conversation(family, 2)
    talk.said("user", "Read it.")
    talk.answered(call_text(family, SPACED))
    talk.said("tool", "x = 1")
    found = num_common(talk.encode(talk.answers).token_ids, talk.cached)
    assert found > num_common(talk.encode(()).token_ids, talk.cached)
    # Mistral's list of calls gets their ids from the template, which no model writes.
    assert (found < len(talk.cached)) if family.name == "mistral" else (found == len(talk.cached))


@each_family
def test_a_call_with_other_spaces_keeps_the_models_spelling_if_nothing_else_differs(family: Family) -> None:
    talk = Conversation(family, 1)
    talk.said("user", "Read it.")
    talk.answered(call_text(family, COMPACT))
    talk.said("tool", "x = 1")
    spliced = talk.encoder.decode(talk.encode(talk.answers).token_ids)
    rendered = talk.encoder.decode(talk.encode(()).token_ids)
    if family.name == "mistral":
        assert spliced == rendered
        return
    assert reused(talk, talk.answers) == 1
    assert COMPACT in spliced
    assert SPACED in rendered
    assert spliced.replace(call_text(family, COMPACT), call_text(family, SPACED)) == rendered
    # What follows is found again in later turns too.
    talk.answered(said_text(family, SAID))
    talk.said("user", "Go on.")
    assert reused(talk, talk.answers) == 1


def test_reasoning_is_found_again_while_tools_run_and_a_template_that_drops_it_changes_the_prompt() -> None:
    talk = Conversation(BY_NAME["qwen3"], 1)
    talk.said("user", "Read it.")
    talk.answered(
        f"<think>\nLet me see, and think of it.\n</think>\n\nI read.\n{call_text(BY_NAME['qwen3'], SPACED)}"
    )
    assert talk.messages[-1].reasoning
    assert talk.messages[-1].tool_calls
    talk.said("tool", "x = 1")
    assert reused(talk, talk.answers) == 1
    talk.said("user", "And now?")
    assert "<think>" not in talk.encode(talk.answers).text
    prompt = talk.encode(talk.answers)
    assert prompt.num_spliced == 0
    assert prompt.token_ids == talk.encode(()).token_ids
    # The next answer is found again behind the prompt that lacks the reasoning.
    talk.answered(SAID)
    talk.said("user", "Go on.")
    assert reused(talk, talk.answers) == 1


@each_family
def test_an_answer_that_the_client_has_changed_is_reused_up_to_there(family: Family) -> None:
    talk = Conversation(family, 2)
    talk.said("user", "Say it.")
    sampled = talk.answered(said_text(family, SAID))
    changed = talk.messages[-1].content.replace("other words", "my own words")
    talk.messages[-1] = ChatMessage("assistant", changed)
    talk.said("user", "Go on.")
    prompt = talk.encode(talk.answers)
    assert changed in prompt.text
    assert talk.encoder.decode(prompt.token_ids) == talk.encoder.decode(talk.encode(()).token_ids)
    assert len(sampled) / 2 < prompt.num_spliced < len(sampled)


def test_of_several_outputs_the_one_that_the_client_sends_back_is_taken() -> None:
    talk = asked("hermes", 1)
    place = place_of(talk.encode(()).text)
    encode = talk.encoder.encode_part
    outputs = [encode(f"{text}<|im_end|>", is_template=True) for text in ("one thing", SAID, "another")]
    talk.answered(SAID)
    others = [Answer(place, ids) for ids in outputs]
    assert reused(talk, [*others, *talk.answers, *others]) == 1


def test_a_text_prompt_repeats_an_output_too() -> None:
    talk = Conversation(BY_NAME["hermes"], 3)
    encoder = talk.encoder
    first = encoder.encode_with(TextPrompt("def foo(bar):"), ())
    sampled = encoder.encode_part("\n  ret", is_template=False) + encoder.encode_part(
        "urn", is_template=False
    )
    answers = [Answer(place_of(first.text), sampled)]
    second = TextPrompt("def foo(bar):\n  return bar")
    spliced = encoder.encode_with(second, answers)
    assert spliced.token_ids[: len(first.token_ids) + len(sampled)] == first.token_ids + sampled
    assert encoder.decode(spliced.token_ids) == second.text


def test_a_control_token_that_was_sampled_stays_text_where_a_client_sends_it_back() -> None:
    talk = asked("hermes", 3)
    start = talk.tokenizer.convert_tokens_to_ids("<|im_start|>")
    words = talk.encoder.encode_part("some words of an answer", is_template=True)
    answer = Answer(place_of(talk.encode(()).text), [*words, start, *words, talk.tokenizer.eos_token_id])
    text = "some words of an answer<|im_start|>some words of an answer"
    talk.messages.append(ChatMessage("assistant", text))
    talk.said("user", "Go on.")
    spliced, plain = talk.encode([answer]), talk.encode(())
    assert spliced.token_ids.count(start) == plain.token_ids.count(start)
    assert talk.encoder.decode(spliced.token_ids) == talk.encoder.decode(plain.token_ids)


@each_family
def test_a_control_token_never_takes_the_place_of_a_clients_text_that_spells_it(family: Family) -> None:
    """The answer has a control token and later its spelling. The prompt has them the other way round."""
    talk = Conversation(family, 3)
    talk.said("user", "Say it.")
    place = place_of(talk.encode(()).text)
    end = talk.tokenizer.eos_token
    first, second, spelled = (
        talk.encoder.encode_part(text, is_template=False)
        for text in (said_text(family, "some words"), "other words", end)
    )
    answer = Answer(place, [*first, talk.tokenizer.eos_token_id, *second, *spelled])
    talk.messages.append(ChatMessage("assistant", f"some words{end}other words"))
    talk.said("user", "Go on.")
    spliced, plain = talk.encode([answer]), talk.encode(())

    def control_places(token_ids: list[int]) -> list[str]:
        control = set(talk.encoder.control(token_ids))
        return [
            talk.encoder.decode(token_ids[:index]) for index, one in enumerate(token_ids) if one in control
        ]

    assert control_places(spliced.token_ids) == control_places(plain.token_ids)


def test_tokens_of_another_tokenizer_are_no_part_of_a_prompt() -> None:
    talk = asked("hermes", 3)
    sampled = talk.answered(SAID)
    talk.said("user", "Go on.")
    unknown = [*sampled[:9], 2**31 - 1, *sampled[9:]]
    prompt = talk.encode([Answer(talk.answers[0].place, unknown)])
    assert 0 < prompt.num_spliced <= 9
    assert max(prompt.token_ids) < len(talk.tokenizer)


CONVERSATIONS = {family.name: Conversation(family, 0) for family in FAMILIES}
TEXTS = st.text(max_size=12) | st.sampled_from(
    [
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "</s>",
        "[/INST]",
        "<think>",
        "a<|im",
        "_end|>b",
        " x ",
        "\n\n",
        "é",
        "e\u0301",
    ]
)
MESSAGES = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), TEXTS), min_size=1, max_size=5)


@examples(150, deadline=None)
@given(
    name=st.sampled_from(sorted(BY_NAME)),
    messages=MESSAGES,
    texts=st.lists(TEXTS, max_size=4),
    ids=st.lists(st.integers(0, 800), max_size=6),
    chance=st.randoms(),
    is_text=st.booleans(),
)
def test_a_splice_changes_neither_text_nor_control_tokens(name, messages, texts, ids, chance, is_text):
    """Answers of any tokens, at all places where one may begin, for any chat: hostile clients and hostile models."""
    talk = CONVERSATIONS[name]
    encoder, tokenizer = talk.encoder, talk.tokenizer
    chat = [ChatMessage(role, content) for role, content in messages]
    whole = TextPrompt("".join(content for _, content in messages) or "x") if is_text else ChatPrompt(chat)
    try:
        plain = encoder.encode_with(whole, ())
    except PromptError:
        return
    repeated = [content for role, content in messages if role == "assistant"]
    answers = []
    for at, content in enumerate([*repeated, *texts]):
        canonical = encoder.encode_part(content + "<|im_end|>" * (at % 2), is_template=at % 3 == 0)
        sampled = other_tokens(tokenizer, canonical, chance)  # type: ignore[arg-type]
        for end in {0, len(plain.text) // 2, *_ends_of(plain.text, content)}:
            answers += [Answer(place_of(plain.text[:end]), ids_) for ids_ in (sampled, sampled + ids, ids)]
    spliced = encoder.encode_with(whole, answers)
    assert spliced.text == plain.text
    assert encoder.decode(spliced.token_ids) == encoder.decode(plain.token_ids)
    assert encoder.control(spliced.token_ids) == encoder.control(plain.token_ids)


def test_a_text_that_spells_a_control_token_keeps_its_spaces_beside_an_answer() -> None:
    encoder = CONVERSATIONS["mistral"].encoder
    prompt = TextPrompt("0</s>0")
    answer = Answer(place_of(""), encoder.encode_part("0", is_template=True))
    spliced, plain = (encoder.encode_with(prompt, answers) for answers in ([answer], ()))
    assert encoder.decode(spliced.token_ids) == encoder.decode(plain.token_ids) == "0</s>0"


def _ends_of(text: str, content: str) -> set[int]:
    """Return where the content begins in the text."""
    return {at for at in range(len(text)) if content and text.startswith(content, at)}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=3)


def spelt(arguments: object, spaces: tuple[str, str], is_ascii: bool) -> str:
    call = {"name": "f", "arguments": arguments}
    text = json.dumps(call, separators=spaces, ensure_ascii=is_ascii)
    return f"Ok {{.\n<tool_call>\n{text}\n</tool_call>"


@given(
    arguments=ARGUMENTS,
    others=ARGUMENTS,
    spaces=st.sampled_from([(",", ":"), (", ", ": "), (",", ": ")]),
    is_ascii=st.booleans(),
)
def test_a_text_takes_the_models_spelling_of_the_same_call_alone(arguments, others, spaces, is_ascii):
    call = Call("f", json.dumps(arguments, sort_keys=True))
    rendered, written = spelt(arguments, (", ", ": "), False), spelt(arguments, spaces, is_ascii)
    assert respelled(f"P{rendered}E", 1, f"{written}E", {call}) == f"P{written}E"
    assert respelled(f"P{rendered}E", 1, f"{written}E", {Call("f", "[]")}) == f"P{rendered}E"
    other = spelt(others, spaces, is_ascii)
    if json.dumps(others, sort_keys=True) != call.arguments:
        assert respelled(f"P{rendered}E", 1, f"{other}E", {call}) == f"P{rendered}E"


@given(st.lists(st.tuples(st.text(), st.lists(st.integers(0, 2**31 - 1)))))
def test_answers_are_packed_and_unpacked(answers: list[tuple[str, list[int]]]) -> None:
    kept = [Answer(place_of(text), ids) for text, ids in answers]
    assert unpack_answers(b"".join(pack_answer(a.place, pack_tokens(a.token_ids)) for a in kept)) == kept


@given(text=st.text(), tail=st.text(min_size=1), other=st.text())
def test_an_answer_belongs_behind_its_prompts_text_alone(text: str, tail: str, other: str) -> None:
    answers = [Answer(place_of(text), [1]), Answer(place_of(other), [2])]
    found = dict(placed(text + tail, answers))
    assert [1] in found[len(text)]
    assert ([2] in found.get(len(other), [])) == (text + tail).startswith(other) or len(other) >= len(
        text + tail
    )
