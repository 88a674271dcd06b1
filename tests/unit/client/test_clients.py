"""Both clients against a real server: one set of tests, since both make the same promises."""

import asyncio

import grpc
import pytest
from blockyard.router.client import (
    AbortedError,
    AsyncClient,
    Client,
    Completion,
    Embedding,
    FieldViolation,
    InvalidRequestError,
    LostTokensError,
    NotFoundError,
    OverloadedError,
    ServerError,
    TimedOutError,
    UnavailableError,
)
from blockyard.router.client.errors import from_rpc
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from .conftest import GOOD_SCRIPT, Fail, Hang, ScriptedRouter, delta, last, logprob, serve
from .drivers import Connect, breakable


async def test_a_stream_is_deltas_and_then_how_it_ended_and_generate_the_whole(connect, address):
    deltas = await connect(address).collect("stream", prompt="x")
    shown = [(d.text, d.token_offset, d.finish is None) for d in deltas]
    assert shown == [("Hel", 0, True), ("", 2, True), ("lo", 3, True), ("", 4, False)]
    whole = await connect(address).call("generate", "x")
    assert isinstance(whole, Completion)
    assert (whole.request_id, whole.text, whole.token_ids) == ("r", "Hello", (1, 2, 3, 4))
    finish = whole.finish
    assert (finish.reason, finish.stop_reason, finish.seed, finish.worker_id) == ("stop", "\n", -3, "w1")
    assert (finish.prompt_tokens, finish.completion_tokens, finish.cached_tokens) == (7, 4, 4)
    assert (finish.time_to_first_token_seconds, finish.total_seconds) == (0.25, 0.5)


async def test_arguments_and_token_reach_the_server(connect: Connect, router: ScriptedRouter, address: str):
    driver = connect(address, token="secret", tenant="research")
    await driver.call(
        "generate",
        messages=[{"role": "user", "content": "hi"}],
        temperature=0.0,
        top_k=None,
        seed=-5,
        stop="end",
        stop_token_ids=[9],
        ignore_eos=False,
        request_id="mine",
        cache_salt="s",
    )
    (request,) = router.requests
    assert request.chat.messages[0].content == "hi"
    sampling = request.sampling
    assert (sampling.HasField("temperature"), sampling.temperature) == (True, 0.0)
    assert (sampling.HasField("ignore_eos"), sampling.HasField("top_k")) == (True, False)
    assert (sampling.seed, list(sampling.stop), list(sampling.stop_token_ids)) == (-5, ["end"], [9])
    assert (request.request_id, request.cache_salt, request.HasField("model")) == ("mine", "s", False)
    assert router.metadata["authorization"] == "Bearer secret"
    assert router.metadata["blockyard-tenant"] == "research"


async def test_embed_sends_its_arguments_and_returns_numbers(connect: Connect, address: str) -> None:
    driver = connect(address)
    assert await driver.call("embed", "abc", request_id="r", timeout_seconds=5.0) == Embedding(
        request_id="r",
        values=(3.0,),
        prompt_tokens=7,
        cached_tokens=4,
        total_seconds=0.5,
        worker_id="w1",
        migrations=2,
    )
    assert (await driver.call("embed", prompt_token_ids=[4, 5, 6], dimensions=2)).values == (4.0, 5.0)
    for wrong in ({}, {"prompt": "a", "prompt_token_ids": [1]}):
        with pytest.raises(ValueError, match="exactly one"):
            await driver.call("embed", **wrong)
    with pytest.raises(TypeError, match="temperature"):
        await driver.call("embed", "a", temperature=0)


async def test_the_other_calls_return_plain_values(connect: Connect, address: str) -> None:
    driver = connect(address)
    assert await driver.call("tokenize", messages=[{"role": "user", "content": "abc"}]) == [3]
    assert await driver.call("detokenize", [4, 5]) == "4,5"
    assert [model.id for model in await driver.call("list_models")] == ["demo"]
    assert (await driver.call("cluster_info")).workers_ready == 2
    assert [worker.worker_id for worker in await driver.call("list_workers")] == ["w1"]
    assert [len(workers) for workers in await driver.collect("watch_workers")] == [1, 2]
    assert (await driver.call("block_pool", "w9")).worker_id == "w9"
    assert [block.block_id for block in await driver.call("list_blocks", "w1")] == [0, 1, 2, 3, 4, 5]
    found = await driver.call("find_blocks", "w1", block_ids=[4], names=[b"n" * 16])
    assert [(block.block_id, block.name) for block in found] == [(4, b""), (0, b"n" * 16)]
    sequences = await driver.call("list_sequences", "w1")
    assert [sequence.sequence_id for sequence in sequences] == [1, 2]
    assert (await driver.call("sequence", "w1", 7)).sequence_id == 7
    assert await driver.call("sequence", "w1", 8) is None
    assert (await driver.call("lookup_prefix", prompt_token_ids=[1, 2])).prompt_tokens == 2
    assert (await driver.call("explain_placement", "x", cache_salt="s")).chosen_worker_id == "s"
    assert [request.request_id for request in await driver.call("list_requests")] == ["r"]


async def test_a_dead_router_is_left_for_the_next_and_without_retries_its_failure_is_final(
    connect: Connect, dead_address: str, address: str
) -> None:
    driver = connect([dead_address, address])
    assert (await driver.call("generate", "x")).text == "Hello"
    assert driver.client._rotation.current == address
    assert (await driver.call("cluster_info")).cluster == "test"
    hasty = connect([dead_address, address], retries=0)
    with pytest.raises(UnavailableError):
        await hasty.call("generate", "x")
    assert (await hasty.call("generate", "x")).text == "Hello"


async def test_retries_are_counted_and_a_stream_that_began_is_never_retried(connect, router, address):
    unavailable = Fail(code=grpc.StatusCode.UNAVAILABLE, reason="NO_WORKER")
    router.scripts = [(GOOD_SCRIPT[0], unavailable), (unavailable,)]
    with pytest.raises(UnavailableError):
        await connect(address).call("generate", "x")
    assert len(router.requests) == 1
    for retries in (0, 2):
        before = len(router.requests)
        with pytest.raises(UnavailableError, match=r"^as scripted$"):
            await connect(address, retries=retries).call("generate", "x")
        assert len(router.requests) - before == retries + 1


async def test_a_router_that_is_not_there_is_named(connect: Connect, dead_address: str) -> None:
    driver = connect(dead_address, retries=0)
    for name, positional in (("generate", "x"), ("tokenize", "x"), ("abort", "r")):
        with pytest.raises(UnavailableError) as failure:
            await driver.call(name, positional)
        assert str(failure.value) == f"no router answers at {dead_address}: connection refused"


async def test_a_connection_that_breaks_in_mid_stream_is_told_as_that(connect, router, address):
    router.scripts = [(GOOD_SCRIPT[0], Hang())]
    async with breakable(address) as (way, break_it):
        driver = connect(way)
        with pytest.raises(UnavailableError) as failure:
            await driver.take_one_and_go_on(break_it, prompt="x")
    assert str(failure.value) == (
        f"lost the connection to the router at {way} in mid-stream: the output is incomplete"
    )
    assert len(router.requests) == 1


async def test_retry_info_is_waited_for(connect: Connect, router: ScriptedRouter, address: str) -> None:
    router.scripts = [(Fail(code=grpc.StatusCode.RESOURCE_EXHAUSTED, retry_delay_seconds=0.3),), GOOD_SCRIPT]
    async with asyncio.timeout(60):
        assert (await connect(address).call("generate", "x")).text == "Hello"
    first, second = router.arrived_at
    assert second - first >= 0.3


@pytest.mark.parametrize(("pushback_ms", "seconds"), [("300", 0.3), ("-1", None), ("soon", None)])
async def test_a_pushback_stands_in_for_a_lost_retry_info(pushback_ms: str, seconds: float | None) -> None:
    trailing = grpc.aio.Metadata(("grpc-retry-pushback-ms", pushback_ms))
    error = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), trailing)
    assert from_rpc(error, "localhost:1").retry_delay_seconds == seconds


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_tenant_that_no_router_takes_is_refused(kind: type) -> None:
    told = r"^tenant: must be 1 to 128 letters, digits or any of . _ : -, not '"
    for tenant in ("tab\there", "naïve", "two words", "", "x" * 129):
        with pytest.raises(ValueError, match=told):
            kind("localhost:1", tenant=tenant)
    with pytest.raises(TypeError, match=r"^tenant: must be text, not int$"):
        kind("localhost:1", tenant=5)


@pytest.mark.parametrize("seconds", [None, 6000])
async def test_exhaustion_is_final_without_retry_info_or_where_the_deadline_comes_first(
    connect: Connect, router: ScriptedRouter, address: str, seconds: float | None
) -> None:
    router.scripts = [
        (Fail(code=grpc.StatusCode.RESOURCE_EXHAUSTED, retry_delay_seconds=seconds),),
        GOOD_SCRIPT,
    ]
    async with asyncio.timeout(60):
        with pytest.raises(OverloadedError) as failure:
            await connect(address).call("generate", "x", timeout_seconds=600)
    assert failure.value.retry_delay_seconds == seconds
    assert len(router.requests) == 1


@pytest.mark.parametrize("how", ["deadline", "close"])
async def test_a_deadline_or_closing_ends_a_silent_stream_on_the_server_too(connect, router, address, how):
    router.scripts = [(GOOD_SCRIPT[0], Hang())]
    if how == "deadline":
        with pytest.raises(TimedOutError):
            await connect(address).call("generate", "x", timeout_seconds=1.0)
    else:
        assert (await connect(address).take_one_and_close(prompt="x")).text == "Hel"
    await asyncio.wait_for(router.cancelled.wait(), 60)


async def test_cancelling_the_task_cancels_the_request(router: ScriptedRouter, address: str) -> None:
    router.scripts = [(GOOD_SCRIPT[0], Hang())]
    async with AsyncClient(address) as client:
        running = asyncio.create_task(client.generate("x"))
        await asyncio.wait_for(router.arrived.wait(), 30)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.wait_for(router.cancelled.wait(), 30)


LOSSY_SCRIPTS = {
    "gap": (delta("a", [1], 0), delta("c", [3], 2), last(2)),
    "doubled": (delta("a", [1], 0), delta("a", [1], 0), last(2)),
    "late start": (delta("b", [2], 1), last(1)),
    "short": (delta("a", [1], 0), last(2)),
    "cut off": (delta("a", [1], 0),),
    "empty": (),
    "goes on": (delta("a", [1], 0), last(1), delta("b", [2], 1)),
}


SEVERAL = (
    delta("x", [7], 0, 1, logprobs=[logprob(7)]),
    delta("a", [1], 0, 0, logprobs=[logprob(1)], prompt_logprobs=[logprob(8), logprob(9)]),
    delta("b", [2, 3], 1, 0, logprobs=[logprob(2), logprob(3)]),
    last(1, 1, cumulative_logprob=-1.75, beam_score=-0.5),
    last(3, 0, cumulative_logprob=-1.5),
)


async def test_several_outputs_may_come_in_any_mixture(connect, router, address):
    router.scripts = [SEVERAL]
    deltas = await connect(address).collect("stream", prompt="x", n=2)
    assert [d.index for d in deltas] == [1, 0, 0, 1, 0]
    assert [d.token_offset for d in deltas] == [0, 0, 1, 1, 3]
    whole = await connect(address).call("generate", "x", n=2)
    first, second = whole.outputs
    assert (first.index, first.text, first.token_ids) == (0, "ab", (1, 2, 3))
    assert (second.index, second.text, second.token_ids) == (1, "x", (7,))
    assert (whole.text, whole.token_ids, whole.finish) == (first.text, first.token_ids, first.finish)
    assert (first.finish.cumulative_logprob, first.finish.beam_score) == (-1.5, None)
    assert (second.finish.cumulative_logprob, second.finish.beam_score) == (-1.75, -0.5)
    assert [(t.token_id, t.logprob, t.rank, t.top) for t in first.logprobs] == [
        (token_id, -token_id / 4, 1, ((token_id, -token_id / 4),)) for token_id in (1, 2, 3)
    ]
    assert [token.token_id for token in whole.prompt_logprobs] == [8, 9]


LOSSY_OUTPUTS = {
    "one is missing": (delta("a", [1], 0), last(1)),
    "one is unfinished": (delta("a", [1], 0), last(1), delta("b", [1], 0, 1)),
    "one has a gap": (delta("a", [1], 0), last(1), delta("b", [1], 1, 1), last(1, 1)),
    "one goes on": (delta("a", [1], 0), last(1), last(0, 1), delta("b", [1], 1)),
    "one too many": (last(0), last(0, 1), last(0, 2)),
    "their offsets are mixed up": (delta("a", [1], 0), delta("b", [2], 1, 1), last(1), last(1, 1)),
    "logprobs are missing": (delta("a", [1, 2], 0, logprobs=[logprob(1)]), last(2), last(0, 1)),
}


LOSSY = [(1, script) for script in LOSSY_SCRIPTS.values()] + [
    (2, script) for script in LOSSY_OUTPUTS.values()
]


@pytest.mark.parametrize(("n", "script"), LOSSY, ids=[*LOSSY_SCRIPTS, *LOSSY_OUTPUTS])
async def test_a_lost_or_doubled_token_of_any_output_is_an_error(connect, router, address, n, script):
    router.scripts = [script]
    with pytest.raises(LostTokensError):
        await connect(address).call("generate", "x", n=n)


ERRORS = [
    (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError),
    (grpc.StatusCode.NOT_FOUND, NotFoundError),
    (grpc.StatusCode.ABORTED, AbortedError),
    (grpc.StatusCode.INTERNAL, ServerError),
    (grpc.StatusCode.UNIMPLEMENTED, InvalidRequestError),
]


@pytest.mark.parametrize(("code", "kind"), ERRORS)
async def test_an_error_tells_code_reason_and_fields(connect, router, address, code, kind):
    router.scripts = [
        (Fail(code=code, reason="TOP_P_RANGE", violations=(("sampling.top_p", "must be in (0, 1]"),)),)
    ]
    with pytest.raises(kind, match="as scripted") as failure:
        await connect(address).call("generate", "x")
    assert (failure.value.code, failure.value.reason) == (code, "TOP_P_RANGE")
    violation = FieldViolation(field="sampling.top_p", description="must be in (0, 1]")
    assert failure.value.field_violations == (violation,)
    assert len(router.requests) == 1


async def test_abort_finds_the_router_that_holds_the_request_and_is_unsure_where_one_is_silent(
    connect: Connect, dead_address: str
) -> None:
    here, there = ScriptedRouter(), ScriptedRouter(holds_request="r")
    async with serve(here) as first, serve(there) as second:
        driver = connect([first, second])
        await driver.call("abort", "r")
        assert (here.aborted, there.aborted) == (["r"], ["r"])
        with pytest.raises(NotFoundError) as failure:
            await driver.call("abort", "other")
        assert failure.value.reason == "NO_SUCH_REQUEST"
        with pytest.raises(UnavailableError):
            await connect([first, dead_address]).call("abort", "other")


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_a_mistake_is_found_before_anything_is_sent(kind: type) -> None:
    mistakes = ([], "a:1,,b:2", "a:1,b", "http://a:1", "[::1]")
    for bad in (*({"addresses": wrong} for wrong in mistakes), {"addresses": "a:1", "retries": -1}):
        with pytest.raises(ValueError, match=r"address|retries"):
            kind(**bad)
    for timeout_seconds in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="timeout_seconds"):
            kind("a:1", timeout_seconds=timeout_seconds)
    client = kind("127.0.0.1:1")
    with pytest.raises(ValueError, match="timeout_seconds"):
        client.stream("x", timeout_seconds=0)
    with pytest.raises(ValueError, match="exactly one"):
        client.stream()
    with pytest.raises(ValueError, match="exactly one"):
        client.stream("x", prompt_token_ids=[1])
    with pytest.raises(TypeError, match="unknown arguments: tempreature"):
        client.stream("x", tempreature=1)


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        ("explain_placement", {"nonsense": 1, "priority": 5}, "unknown arguments: nonsense, priority"),
        ("lookup_prefix", {"nonsense": 1, "priority": 5}, "unknown arguments: nonsense, priority"),
        ("explain_placement", {"cache_salt": 5}, "cache_salt: must be text, not int"),
        ("lookup_prefix", {"cache_salt": 5}, "cache_salt: must be text, not int"),
        ("explain_placement", {"session_id": 5}, "session_id: must be text, not int"),
        ("generate", {"session_id": 5}, "session_id: must be text, not int"),
        ("abort", {"request_id": 5}, "request_id: must be text, not int"),
    ],
)
async def test_an_argument_that_is_unknown_or_no_text_is_a_type_error_with_its_name(
    connect: Connect, address: str, name: str, wrong: dict, told: str
) -> None:
    with pytest.raises(TypeError, match=f"^{told}$"):
        await connect(address).call(name, *(() if name == "abort" else ("x",)), **wrong)


async def test_a_call_continues_the_callers_trace(connect: Connect, router: ScriptedRouter, address: str):
    driver = connect(address, token="secret")
    parent = SpanContext(trace_id=7, span_id=5, is_remote=False, trace_flags=TraceFlags(1))
    with use_span(NonRecordingSpan(parent)):
        await driver.call("generate", "x")
    assert router.metadata["traceparent"] == f"00-{7:032x}-{5:016x}-01"
    await driver.call("generate", "x")
    assert "traceparent" not in router.metadata
    assert router.metadata["authorization"] == "Bearer secret"
