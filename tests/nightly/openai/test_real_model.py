"""Loops of tools and agents' hints with OpenAI's and Anthropic's own clients, a real router and the demo model.

The demo model was never trained to call tools. `tool_choice` forces each call, and the grammar its form.
"""

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import jsonschema
import openai
import pytest
from anthropic import Anthropic, beta_tool
from openai import OpenAI
from pydantic import BaseModel

BLOCK_TOKENS = 16
ASKS = [{"role": "user", "content": "Read a file, then finish."}]
READ = {
    "type": "object",
    "properties": {
        "path": {"enum": ["a.py", "b.py"]},
        "lines": {"type": "integer", "maximum": 99, "minimum": 1},
    },
    "required": ["path", "lines"],
    "additionalProperties": False,
}
FINISH = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
SCHEMAS = {"read_file": READ, "finish": FINISH}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
CLAUDES_TOOLS: Any = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
NO_REGEX = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}}


class Verdict(BaseModel):
    ok: bool


@pytest.fixture(scope="module")
def gpt(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60.0, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=url, api_key="none", timeout=60.0, max_retries=0) as made:
        yield made


def called(client: OpenAI, messages: list[Any], choice: Any, *, streams: bool) -> list[Any]:
    """Run one turn, add its answer to the messages, and return its calls."""
    asked: dict[str, Any] = {"model": "demo", "messages": messages, "tools": TOOLS, "tool_choice": choice}
    asked |= {"parallel_tool_calls": False, "max_tokens": 200, "seed": 7}
    if streams:
        with client.chat.completions.stream(**asked) as stream:
            completion: Any = stream.get_final_completion()
    else:
        completion = client.chat.completions.create(**asked)
    (answer,) = completion.choices
    assert answer.finish_reason == "tool_calls"
    messages.append(answer.message.model_dump(exclude_none=True))
    return list(answer.message.tool_calls)


def answered(client: Anthropic, *, streams: bool, **asked: Any) -> anthropic.types.Message:
    hints = {"extra_body": {"seed": 7}}
    asked = {"model": "demo", "max_tokens": 200, "tools": CLAUDES_TOOLS, **hints, **asked}
    if not streams:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        return stream.get_final_message()


@pytest.mark.parametrize("streams", [False, True])
def test_three_turns_of_openais_calls_and_results_end_with_text(gpt: OpenAI, streams: bool) -> None:
    messages: list[Any] = [*ASKS]
    for choice in ("required", {"type": "function", "function": {"name": "finish"}}):
        (call,) = called(gpt, messages, choice, streams=streams)
        name = call.function.name
        assert choice == "required" or name == "finish"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[name])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "def f(x): return x"})
    last: Any = gpt.chat.completions.create(
        model="demo", messages=messages, tools=TOOLS, tool_choice="none", max_tokens=8
    )
    assert (last.choices[0].message.tool_calls, bool(last.choices[0].message.content)) == (None, True)
    assert last.usage.prompt_tokens_details.cached_tokens, "each turn reuses the one before"


@pytest.mark.parametrize("streams", [False, True])
def test_three_turns_of_anthropics_calls_and_results_end_with_text(claude: Anthropic, streams: bool) -> None:
    messages: list[Any] = [*ASKS]
    for choice in ({"type": "any"}, {"type": "tool", "name": "finish"}):
        choice["disable_parallel_tool_use"] = True  # type: ignore[assignment]
        answer = answered(claude, streams=streams, messages=messages, tool_choice=choice)
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        assert answer.stop_reason == "tool_use"
        assert choice["type"] == "any" or call.name == "finish"
        jsonschema.validate(call.input, SCHEMAS[call.name])
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "def f(x): return x"}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    last = answered(claude, streams=streams, messages=messages, tool_choice={"type": "none"}, max_tokens=8)
    assert [block.type for block in last.content] == ["text"]
    assert last.usage.cache_read_input_tokens, "each turn reuses the one before"
    count = claude.messages.count_tokens(model="demo", messages=messages, tools=CLAUDES_TOOLS)
    assert count.input_tokens == last.usage.input_tokens + last.usage.cache_read_input_tokens


def test_anthropics_own_runner_of_tools_calls_the_function(claude: Anthropic) -> None:
    asked_for: list[str] = []

    @beta_tool
    def get_weather(city: Literal["Oslo", "Rome"]) -> str:
        """Tell the weather of a city."""
        asked_for.append(city)
        return f"It is mild in {city}."

    runner = claude.beta.messages.tool_runner(
        model="demo",
        max_tokens=96,
        messages=[{"role": "user", "content": "How is the weather?"}],
        tools=[get_weather],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_iterations=2,
    )
    assert [answer.stop_reason for answer in runner] == ["tool_use"] * 2
    assert len(asked_for) == 2


def test_the_text_follows_the_schema_of_a_class(claude: Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "Is it so?"}]
    answer = claude.messages.parse(model="demo", max_tokens=64, messages=messages, output_format=Verdict)
    assert isinstance(answer.parsed_output, Verdict)


def test_a_schema_that_cannot_be_followed_is_refused_under_the_name_of_tools(
    gpt: OpenAI, claude: Anthropic
) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": NO_REGEX}}]
    messages: Any = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.BadRequestError, match="look-ahead") as caught:
        gpt.chat.completions.create(model="demo", messages=messages, tools=tools, tool_choice="required")
    assert (caught.value.param, caught.value.type) == ("tools", "invalid_request_error")
    own: Any = [{"name": "f", "input_schema": NO_REGEX}]
    with pytest.raises(anthropic.BadRequestError, match=r"tools: .*look-ahead"):
        answered(claude, streams=True, messages=messages, tools=own, tool_choice={"type": "any"})


def chat(client: OpenAI, text: str, *, salt: str, **extra: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    body = {"cache_salt": salt, **extra}
    return client.chat.completions.create(
        model="demo", messages=messages, max_tokens=12, temperature=0, extra_body=body
    )


def cached(answer: Any) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


def full_blocks(answer: Any) -> int:
    """Return the tokens of the prompt's full blocks. Its last token is computed anew."""
    return (answer.usage.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("length", [40, 41, 200, 333])
def test_after_a_prefetch_every_full_block_of_the_prompt_is_cached_and_the_tokens_are_the_same(
    gpt: OpenAI, length: int
) -> None:
    text = "def f(x):\n" + "".join(f"    x += {number}\n" for number in range(length // 8))
    plain = chat(gpt, text, salt=f"plain-{length}")
    assert cached(plain) == 0
    ahead = chat(gpt, text, salt=f"ahead-{length}", prefetch=True, session_id="s")
    assert (ahead.choices[0].message.content, ahead.choices[0].finish_reason) == ("", "length")
    assert (ahead.usage.completion_tokens, ahead.usage.prompt_tokens) == (0, plain.usage.prompt_tokens)
    assert cached(ahead) == 0
    after = chat(gpt, text, salt=f"ahead-{length}", session_id="s", expected_pause_seconds=0.5)
    again = chat(gpt, text, salt=f"ahead-{length}", session_id="s")
    assert cached(after) == cached(again) == full_blocks(plain)
    contents = {answer.choices[0].message.content for answer in (plain, after, again)}
    assert len(contents) == 1


def test_every_route_may_prefetch_and_a_stream_of_it_has_no_text(gpt: OpenAI, claude: Anthropic) -> None:
    ahead: Any = {"extra_body": {"prefetch": True}}
    messages: Any = [{"role": "user", "content": "def g(y):\n" * 20}]
    usage: Any = {"stream_options": {"include_usage": True}}
    *chunks, last = gpt.chat.completions.create(
        model="demo", messages=messages, stream=True, **usage, **ahead
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    assert (chunks[-1].choices[0].finish_reason, last.usage.completion_tokens) == ("length", 0)
    prompt = "return value " * 20
    gpt.completions.create(model="demo", prompt=prompt, **ahead)
    answer = gpt.completions.create(model="demo", prompt=prompt, max_tokens=1)
    assert cached(answer) == full_blocks(answer) > 0
    asked: Any = {
        "model": "demo",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "import os\n" * 30}],
    }
    whole = claude.messages.create(**asked, **ahead)
    assert (whole.content, whole.stop_reason, whole.usage.output_tokens) == ([], "max_tokens", 0)
    after = claude.messages.create(**asked, extra_body={"session_id": "s", "expected_pause_seconds": 5})
    assert after.usage.cache_read_input_tokens
    assert after.usage.input_tokens <= BLOCK_TOKENS
