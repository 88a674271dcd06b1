"""A loop of tools in three turns, with OpenAI's own client, a real router, and a real worker with the demo model.

The demo model was never trained to call tools. `tool_choice` forces each call, and the grammar its form.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI

from tests.system.processes import DETERMINISTIC, processes

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


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    with processes(tmp_path_factory.mktemp("loop")) as running:
        worker = running.add_worker("w0", *DETERMINISTIC)
        router = running.add_router("r0", "--http-port", "0", workers=[worker.address])
        running.start(worker, router)
        found = re.search(r"http://(\S+)/v1", router.log_text())
        assert found
        with OpenAI(base_url=f"http://{found[1]}/v1", api_key="none", timeout=60.0, max_retries=0) as made:
            yield made


def called(client: OpenAI, messages: list[Any], choice: Any, *, streams: bool) -> list[Any]:
    """Run one turn, add its answer to the messages, and return its calls."""
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": messages,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "seed": 7,
    }
    if streams:
        with client.chat.completions.stream(**asked) as stream:
            completion: Any = stream.get_final_completion()
    else:
        completion = client.chat.completions.create(**asked)
    (answer,) = completion.choices
    assert answer.finish_reason == "tool_calls"
    messages.append(answer.message.model_dump(exclude_none=True))
    return list(answer.message.tool_calls)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("streams", [False, True])
def test_three_turns_of_calls_and_results_end_with_text(client: OpenAI, streams: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "Read a file, then finish."}]
    for choice in ("required", {"type": "function", "function": {"name": "finish"}}):
        (call,) = called(client, messages, choice, streams=streams)
        name = call.function.name
        assert choice == "required" or name == "finish"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[name])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "def f(x): return x"})
    last = client.chat.completions.create(
        model="demo", messages=messages, tools=TOOLS, tool_choice="none", max_tokens=8
    )
    assert last.choices[0].message.tool_calls is None
    assert last.choices[0].message.content
    assert last.usage is not None
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens, "each turn reuses the one before"


def test_a_schema_that_cannot_be_followed_is_refused_under_the_name_of_tools(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}}
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "x"}], tools=tools, tool_choice="required"
        )
    body: Any = caught.value.body
    assert (body["param"], body["type"]) == ("tools", "invalid_request_error")
    assert "look-ahead" in body["message"]
