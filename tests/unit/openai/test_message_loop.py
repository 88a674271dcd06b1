"""A loop of tools in three turns, with Anthropic's own client, a real router, and a real worker with the demo model.

The demo model was never trained to call tools. `tool_choice` forces each call, and the grammar its form.
"""

import re
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import jsonschema
import pytest
from anthropic import Anthropic, beta_tool
from pydantic import BaseModel

from tests.system.processes import DETERMINISTIC, processes

from .test_tool_loop import SCHEMAS

TOOLS: Any = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]


class Verdict(BaseModel):
    ok: bool


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Anthropic]:
    with processes(tmp_path_factory.mktemp("loop")) as running:
        worker = running.add_worker("w0", *DETERMINISTIC)
        router = running.add_router("r0", "--http-port", "0", workers=[worker.address])
        running.start(worker, router)
        found = re.search(r"(http://\S+)/v1", router.log_text())
        assert found
        with Anthropic(base_url=found[1], api_key="none", timeout=60.0, max_retries=0) as made:
            yield made


def answered(client: Anthropic, *, streams: bool, **asked: Any) -> anthropic.types.Message:
    asked = {"model": "demo", "max_tokens": 200, "tools": TOOLS, "extra_body": {"seed": 7}, **asked}
    if not streams:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        return stream.get_final_message()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("streams", [False, True])
def test_three_turns_of_calls_and_results_end_with_text(client: Anthropic, streams: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "Read a file, then finish."}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "finish"}):
        choice["disable_parallel_tool_use"] = True  # type: ignore[assignment]
        answer = answered(client, streams=streams, messages=messages, tool_choice=choice)
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        assert answer.stop_reason == "tool_use"
        assert choice["type"] == "any" or call.name == "finish"
        jsonschema.validate(call.input, SCHEMAS[call.name])
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "def f(x): return x"}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    last = answered(client, streams=streams, messages=messages, tool_choice={"type": "none"}, max_tokens=8)
    assert [block.type for block in last.content] == ["text"]
    assert last.usage.cache_read_input_tokens, "each turn reuses the one before"
    count = client.messages.count_tokens(model="demo", messages=messages, tools=TOOLS)
    assert count.input_tokens == last.usage.input_tokens + last.usage.cache_read_input_tokens


def test_anthropics_own_runner_of_tools_calls_the_function(client: Anthropic) -> None:
    asked_for: list[str] = []

    @beta_tool
    def get_weather(city: Literal["Oslo", "Rome"]) -> str:
        """Tell the weather of a city."""
        asked_for.append(city)
        return f"It is mild in {city}."

    runner = client.beta.messages.tool_runner(
        model="demo",
        max_tokens=96,
        messages=[{"role": "user", "content": "How is the weather?"}],
        tools=[get_weather],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_iterations=2,
    )
    assert [answer.stop_reason for answer in runner] == ["tool_use"] * 2
    assert len(asked_for) == 2


def test_the_text_follows_the_schema_of_a_class(client: Anthropic) -> None:
    answer = client.messages.parse(
        model="demo",
        max_tokens=64,
        messages=[{"role": "user", "content": "Is it so?"}],
        output_format=Verdict,
    )
    assert isinstance(answer.parsed_output, Verdict)


def test_a_schema_that_cannot_be_followed_is_refused_under_the_name_of_tools(client: Anthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}}
    with pytest.raises(anthropic.BadRequestError, match=r"tools: .*look-ahead"):
        answered(
            client,
            streams=True,
            messages=[{"role": "user", "content": "x"}],
            tools=[{"name": "f", "input_schema": schema}],
            tool_choice={"type": "any"},
        )
