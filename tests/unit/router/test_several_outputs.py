"""Several outputs, beams, scores and structured output of one request, over real gRPC, with scripted workers."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from blockyard.proto.v1 import inference_pb2, session_pb2
from blockyard.router.generation.client_buffer import Delta, Emit
from blockyard.router.services import interceptor
from blockyard.router.services.delta_messages import gathered

from .fake_worker import FakeWorker, Script, expected_logprob, expected_tokens, token_logprobs
from .rig import (
    Router,
    fields_of,
    is_idle,
    reason_of,
    refused,
    request,
    running_router,
    until,
    worker_of_model,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG = {"max_tokens": 200, "ignore_eos": True}


@dataclass
class Streamed:
    """One output as its stream brought it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprob] = field(default_factory=list)
    finish: inference_pb2.Finish | None = None
    num_deltas: int = 0


async def stream(router: Router, message: inference_pb2.GenerateRequest) -> dict[int, Streamed]:
    """Every output, proven contiguous, with nothing after its finish."""
    outputs: dict[int, Streamed] = defaultdict(Streamed)
    async for response in router.inference.GenerateStream(message):
        output = outputs[response.delta.index]
        assert output.finish is None, "an output goes on after its finish"
        assert response.delta.token_offset == len(output.token_ids)
        output.text += response.delta.text
        output.token_ids += response.delta.token_ids
        output.logprobs += response.delta.logprobs
        output.num_deltas += 1
        if response.HasField("finish"):
            output.finish = response.finish
    assert all(output.finish is not None for output in outputs.values())
    return outputs


def decode(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def score(tokens: list[int]) -> float:
    return sum(map(expected_logprob, tokens))


async def test_each_output_has_its_own_text_finish_and_score(router: Router, tokenizer: Any) -> None:
    script = Script(lengths=(20, 3, 11))
    async with router.workers(worker_of_model("a", script=lambda submit: script)):
        outputs = await stream(router, request(sampling={"n": 3}))
        whole = await router.inference.Generate(request(sampling={"n": 3}))
    assert outputs.keys() == {0, 1, 2}
    for index, output in outputs.items():
        tokens = expected_tokens(1, script.lengths[index], index)
        assert (output.token_ids, output.text) == (tokens, decode(tokenizer, tokens))
        assert output.finish is not None
        assert output.finish.usage.completion_tokens == len(tokens)
        assert output.finish.usage.cached_tokens == 32
        assert output.finish.cumulative_logprob == score(tokens)
        assert output.logprobs == [], "only the router needed them"
        answer = whole.outputs[index]
        assert (answer.index, list(answer.token_ids), answer.text) == (index, tokens, output.text)
        assert answer.finish.cumulative_logprob == score(tokens)
    assert (whole.text, list(whole.token_ids)) == (outputs[0].text, outputs[0].token_ids)
    assert whole.finish == whole.outputs[0].finish


async def test_a_whole_answer_has_its_outputs_in_order_however_they_came() -> None:
    async def run(emit: Emit) -> None:
        for index in (2, 0, 1, 0):
            finish = inference_pb2.Finish(seed=index)
            emit(Delta(text=f"{index}", token_ids=[index], token_offset=0, index=index, finish=finish))

    whole = await gathered("r", run)
    assert [(output.index, output.text) for output in whole.outputs] == [(0, "00"), (1, "1"), (2, "2")]
    assert (whole.text, list(whole.token_ids), whole.finish.seed) == ("00", [0, 0], 0)


async def test_one_output_is_the_first_and_only_one(router: Router, worker: FakeWorker) -> None:
    whole = await router.inference.Generate(request(priority=-7))
    (only,) = whole.outputs
    assert (only.text, only.token_ids, only.finish) == (whole.text, whole.token_ids, whole.finish)
    assert not whole.finish.HasField("cumulative_logprob")
    (submit,) = worker.submits
    assert (submit.sampling.HasField("logprobs"), submit.priority) == (False, -7)


async def test_a_stop_string_ends_one_output_and_leaves_the_others(router, worker, tokenizer):
    texts = [decode(tokenizer, expected_tokens(1, 200, index)) for index in range(3)]
    stop = next(
        texts[1][at : at + 8]
        for at in range(40, len(texts[1]))
        if texts[1].find(texts[1][at : at + 8]) == at
        and not any(texts[1][at : at + 8] in texts[i] for i in (0, 2))
    )
    outputs = await stream(router, request(sampling={**LONG, "n": 3, "stop": [stop]}))
    assert outputs[1].text == texts[1][: texts[1].find(stop)]
    finish = outputs[1].finish
    assert finish is not None
    assert (finish.reason, finish.stop_reason) == (inference_pb2.FINISH_REASON_STOP, stop)
    assert finish.cumulative_logprob == score(outputs[1].token_ids)
    assert [outputs[i].text for i in (0, 2)] == [texts[0], texts[2]]
    assert [index for _, index in worker.cancelled_outputs] == [1]
    assert worker.cancelled == []


async def test_beams_come_at_the_end_with_one_delta_each_and_their_scores(router: Router, worker: FakeWorker):
    message = request(sampling={"n": 2, "beam_width": 4, "length_penalty": 0.5, "early_stopping": 2})
    outputs = await stream(router, message)
    assert {index: output.num_deltas for index, output in outputs.items()} == {0: 1, 1: 1}
    for index, output in outputs.items():
        assert output.token_ids == expected_tokens(1, 20, index)
        assert output.finish is not None
        assert output.finish.cumulative_logprob == -10.0 * index
        assert output.finish.beam_score == -1.0 * index
    sampling = worker.submits[0].sampling
    assert (sampling.beam_width, sampling.n, sampling.length_penalty) == (4, 2, 0.5)
    assert sampling.early_stopping == inference_pb2.EARLY_STOPPING_FIRST
    whole = await router.inference.Generate(message)
    assert [output.finish.beam_score for output in whole.outputs] == [0.0, -1.0]


async def test_logprobs_are_cut_with_the_tokens_that_a_stop_string_cuts(router: Router, tokenizer: Any):
    text = decode(tokenizer, expected_tokens(1, 200))
    message = request(sampling={**LONG, "logprobs": 2, "stop": [text[60:66]]})
    async with router.workers(worker_of_model("a")) as (worker,):
        for tokens_a_step in (1, 7, 200):
            worker.script = lambda submit, number=tokens_a_step: Script(tokens_a_step=number)
            output = (await stream(router, message))[0]
            whole = await router.inference.Generate(message)
            assert output.text == text[: text.find(text[60:66])]
            assert len(output.token_ids) < 200
            assert output.logprobs == token_logprobs(output.token_ids, 2)
            assert output.finish is not None
            assert output.finish.cumulative_logprob == score(output.token_ids)
            assert list(whole.outputs[0].logprobs) == output.logprobs


async def test_a_prompts_logprobs_come_with_the_first_delta(router: Router, worker: FakeWorker) -> None:
    ids = list(range(300, 340))
    message = inference_pb2.GenerateRequest(
        prompt_token_ids={"ids": ids}, sampling={"max_tokens": 5, "prompt_logprobs": 1, "n": 2}
    )
    reported = [
        list(response.delta.prompt_logprobs)
        async for response in router.inference.GenerateStream(message)
        if response.delta.prompt_logprobs
    ]
    assert reported == [token_logprobs(ids[1:], 1)]
    whole = await router.inference.Generate(message)
    assert list(whole.prompt_logprobs) == reported[0]


async def test_a_stop_has_text_only_where_the_client_wants_it(router: Router, tokenizer: Any) -> None:
    tokens = expected_tokens(1, 5)
    async with router.workers(worker_of_model("a", script=lambda submit: Script(stop_token_at=5))):
        for include in (True, False):
            stops = {"stop_token_ids": [tokens[-1]], "include_stop_in_output": include}
            asked = await router.inference.Generate(request(sampling=stops))
            ended = await router.inference.Generate(request(sampling={"include_stop_in_output": include}))
            assert list(asked.token_ids) == list(ended.token_ids) == tokens
            assert asked.text == decode(tokenizer, tokens if include else tokens[:-1])
            assert ended.text == decode(tokenizer, tokens[:-1]), "an end-of-sequence token never has text"
    async with router.workers(worker_of_model("a")):
        text = decode(tokenizer, expected_tokens(1, 200))
        stop = text[60:66]
        sampling = {**LONG, "stop": [stop], "include_stop_in_output": True}
        answer = await router.inference.Generate(request(sampling=sampling))
        assert answer.text == text[: text.find(stop) + len(stop)]


async def test_a_grammar_that_the_worker_cannot_compile_is_an_invalid_argument(router: Router) -> None:
    script = Script(reject=session_pb2.REJECT_REASON_GRAMMAR)
    async with router.workers(worker_of_model("a", script=lambda submit: script)) as (worker,):
        error = await refused(
            router.inference.Generate(request(sampling={"structured_output": {"regex": "hunter(2"}}))
        )
        assert worker.submits[0].sampling.structured_output.regex == "hunter(2"
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert fields_of(error) == ["sampling.structured_output"]
    assert "hunter" not in (error.details() or "")


async def test_the_limits_of_outputs_and_beams_are_the_routers() -> None:
    async with running_router(max_outputs=3, max_beam_width=5) as own:
        for name, value in (("n", 4), ("beam_width", 6)):
            error = await refused(own.inference.Generate(request(sampling={name: value})))
            assert fields_of(error) == [f"sampling.{name}"]


async def test_an_admitted_request_counts_as_many_as_its_outputs(router: Router, worker: FakeWorker) -> None:
    """The router admits 8."""
    running = router.inference.GenerateStream(request(sampling={"max_tokens": 400, "n": 6}))
    await anext(aiter(running))
    error = await refused(router.inference.Generate(request(sampling={"n": 3})))
    assert reason_of(error) == "OVERLOADED"
    assert await router.inference.Generate(request(sampling={"n": 2}))
    running.cancel()
    await until(lambda: is_idle(router))
    await until(lambda: worker.num_running == 0)
    assert len((await router.inference.Generate(request(sampling={"n": 9}))).outputs) == 9, "alone it may"


async def test_an_answer_that_fits_no_message_is_refused_in_words_and_can_be_streamed(
    router: Router, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(sampling=LONG | {"logprobs": 5})
    num_bytes = (await router.inference.Generate(asked)).ByteSize()
    monkeypatch.setattr(interceptor, "MAX_RESPONSE_BYTES", num_bytes // 2)
    error = await refused(router.inference.Generate(asked))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "REQUEST_TOO_LARGE")
    assert "ask for a stream" in (error.details() or "")
    output = (await stream(router, asked))[0]
    assert (len(output.token_ids), len(output.logprobs)) == (200, 200)
    await until(lambda: is_idle(router))
