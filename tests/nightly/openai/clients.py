"""Real clients of OpenAI's API against the gateway: `python tests/unit/openai/clients.py CLIENT URL TOKENIZER`.

This is a separate program, because each client's packages have their own environment (`make test-clients`). It imports
nothing of this project. It fails by an assertion; the server must give the same greedy answer each time.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

ASKED = "Write a function that joins two paths."
PROMPT = "def read_lines(path):"
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "answer", "description": "An answer.", "parameters": SCHEMA}}
FLAT_TOOL: Any = {"type": "function", "name": "answer", "parameters": SCHEMA, "strict": True}
SCORED = [("def f(x):\n    return", " x"), ("import", " os"), ("for i in range", " zzz")]


def litellm(url: str, tokenizer: str) -> None:
    import litellm  # type: ignore[import-not-found]

    messages = [{"role": "user", "content": ASKED}]
    for model in ("openai/demo", "hosted_vllm/demo"):
        asked: dict[str, Any] = {"model": model, "api_base": url, "api_key": "none", "messages": messages}
        asked |= {"max_tokens": 16, "temperature": 0}
        whole = litellm.completion(**asked)
        text, usage = "", None
        for chunk in litellm.completion(**asked, stream=True, stream_options={"include_usage": True}):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            usage = getattr(chunk, "usage", None) or usage
        assert text == whole.choices[0].message.content
        assert usage.completion_tokens == whole.usage.completion_tokens == 16
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
        shaped = litellm.completion(**(asked | {"max_tokens": 64, "response_format": form}))
        assert json.loads(shaped.choices[0].message.content).keys() == {"ok"}
        forced = {**asked, "max_tokens": 96, "tools": [TOOL], "tool_choice": "required"}
        (call, *_) = litellm.completion(**forced).choices[0].message.tool_calls
        assert call.function.name == "answer"
        chunks = list(litellm.completion(**forced, stream=True))
        (call, *_) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
        assert call.function.name == "answer"
        # litellm takes additionalProperties out of schemas for vLLM, so there may be more.
        assert "ok" in json.loads(call.function.arguments)
        refused = ""
        try:
            litellm.completion(**(asked | {"temperature": -1}))
        except litellm.BadRequestError as error:
            refused = str(error)
        assert "temperature: must be" in refused
    called = litellm.responses(
        model="openai/demo",
        api_base=url,
        api_key="none",
        input=ASKED,
        tools=[FLAT_TOOL],
        tool_choice="required",
        temperature=0,
        max_output_tokens=96,
    )
    assert [item.type for item in called.output][:1] == ["function_call"]
    kinds = {
        str(getattr(event.type, "value", event.type))
        for event in litellm.responses(
            model="openai/demo", api_base=url, api_key="none", input=ASKED, max_output_tokens=8, stream=True
        )
    }
    # It does not know the model, so it asks for a whole answer and makes the events itself.
    assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds, kinds
    echoed = litellm.text_completion(
        model="text-completion-openai/demo",
        api_base=url,
        api_key="none",
        prompt=PROMPT,
        max_tokens=4,
        echo=True,
    )
    assert echoed.choices[0].text.startswith(PROMPT)


def langchain(url: str, tokenizer: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage  # type: ignore[import-not-found]
    from langchain_openai import ChatOpenAI, OpenAI  # type: ignore[import-not-found]

    settings: dict[str, Any] = {"base_url": url, "api_key": "none", "model": "demo", "temperature": 0}
    chat = ChatOpenAI(**settings, max_tokens=16)
    answer = chat.invoke(ASKED)
    assert answer.usage_metadata["output_tokens"] == 16
    assert "".join(chunk.content for chunk in chat.stream(ASKED)) == answer.content
    assert [each.content for each in chat.batch([ASKED] * 3)] == [answer.content] * 3
    told = chat.bind(logprobs=True, top_logprobs=2).invoke(ASKED).response_metadata["logprobs"]["content"]
    assert len(told) == 16
    shaped = ChatOpenAI(**settings, max_tokens=64).with_structured_output(
        {"title": "answer", **SCHEMA}, method="json_schema"
    )
    assert shaped.invoke(ASKED).keys() == {"ok"}
    called = ChatOpenAI(**settings, max_tokens=96).with_structured_output(
        {"title": "answer", "description": "An answer.", **SCHEMA}, method="function_calling"
    )
    assert called.invoke(ASKED).keys() == {"ok"}
    forced = ChatOpenAI(**settings, max_tokens=96).bind_tools([TOOL], tool_choice="required")
    gathered = None
    for chunk in forced.stream(ASKED):
        gathered = chunk if gathered is None else gathered + chunk
    assert gathered is not None
    assert [call["name"] for call in gathered.tool_calls][:1] == ["answer"]
    told = ChatOpenAI(**settings, max_tokens=16, use_responses_api=True)
    assert told.invoke(ASKED).text == "".join(chunk.text for chunk in told.stream(ASKED))
    bound = ChatOpenAI(**settings, use_responses_api=True).bind_tools([TOOL], tool_choice="required")
    turns: list[Any] = [HumanMessage(ASKED)]
    for _ in range(2):
        turn = bound.invoke(turns, parallel_tool_calls=False)
        (call,) = turn.tool_calls
        assert call["name"] == "answer"
        turns += [turn, ToolMessage("Done.", tool_call_id=call["id"])]
    closing = ChatOpenAI(**settings, max_tokens=8, use_responses_api=True, use_previous_response_id=True)
    assert closing.invoke(turns).usage_metadata["input_tokens"] > 0
    completion = OpenAI(**settings, max_tokens=8)
    assert "".join(completion.stream(PROMPT)) == completion.invoke(PROMPT)


def agents(url: str, tokenizer: str) -> None:
    """Run an agent on either API: the model calls a tool, gets its result and answers, whole and streamed."""
    from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel  # type: ignore[import-not-found]

    for model in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        _agent(url, model)


def _agent(url: str, model: Any) -> None:
    from agents import (
        Agent,
        ModelSettings,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    asked_for: list[str] = []

    @function_tool  # type: ignore[untyped-decorator]
    def get_weather(city: Literal["Oslo", "Rome"]) -> str:
        """Tell the weather of a city."""
        asked_for.append(city)
        return f"It is mild in {city}."

    agent = Agent(
        name="forecaster",
        model=model(model="demo", openai_client=AsyncOpenAI(base_url=url, api_key="none")),
        tools=[get_weather],
        model_settings=ModelSettings(
            tool_choice="required", parallel_tool_calls=False, max_tokens=64, temperature=0
        ),
    )

    async def run() -> None:
        whole = await Runner.run(agent, "How is the weather?", max_turns=4)
        assert whole.final_output
        streamed = Runner.run_streamed(agent, "How is the weather?", max_turns=4)
        kinds = {event.data.type async for event in streamed.stream_events() if hasattr(event, "data")}
        assert "response.function_call_arguments.delta" in kinds
        assert streamed.final_output == whole.final_output

    asyncio.run(run())
    assert len(asked_for) == 2


def guidellm(url: str, tokenizer: str) -> None:
    for route in ("/v1/chat/completions", "/v1/completions"):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            backend = f"kind=openai_http,target={url.removesuffix('/v1')},model=demo,request_format={route}"
            command = [
                *(str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"),
                *("--backend", backend, "--tokenizer", f"kind=hf_auto,model={tokenizer}"),
                *("--data", "kind=synthetic_text,prompt_tokens=48,output_tokens=8"),
                *("--profile", "kind=concurrent,streams=[4]", "--constraint", "kind=max_requests,count=8"),
                *("--output", f"kind=json,path={report}"),
            ]
            subprocess.run(command, check=True, timeout=120)
            (benchmark,) = json.loads(report.read_text())["benchmarks"]
            requests = benchmark["requests"]
            assert len(requests["successful"]) >= 8, benchmark
            assert not requests["errored"], requests["errored"]


def lm_eval(url: str, tokenizer: str) -> None:
    """Prints the log-likelihoods of SCORED, which the caller compares with the model's own."""
    from lm_eval.api.instance import Instance  # type: ignore[import-not-found]
    from lm_eval.models.openai_completions import LocalCompletionsAPI  # type: ignore[import-not-found]

    for is_tokenized in (True, False):
        model = LocalCompletionsAPI(
            base_url=f"{url}/completions",
            model="demo",
            tokenizer=tokenizer,
            tokenizer_backend="huggingface",
            tokenized_requests=is_tokenized,
            batch_size=2 if is_tokenized else 1,
        )
        asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(SCORED)]
        scores = model.loglikelihood(asked)
        (text,) = model.generate_until(
            [Instance("generate_until", {}, (PROMPT, {"until": ["\n\n"], "max_gen_toks": 12}), 0)]
        )
        assert text
        print(json.dumps(scores))


if __name__ == "__main__":
    client, *arguments = sys.argv[1:]
    {
        "litellm": litellm,
        "langchain": langchain,
        "guidellm": guidellm,
        "lm_eval": lm_eval,
        "agents": agents,
    }[client](*arguments)
