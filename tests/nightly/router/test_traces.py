"""One trace from the client's `traceparent` to the last token, through a router and real workers."""

import asyncio
import json

import pytest
from blockyard.router.cluster import link
from blockyard.worker.server import WorkerServer
from opentelemetry.trace import StatusCode

from tests.unit.router.trace_rig import (
    PARENT_ID,
    SAMPLED,
    SECRET_TEXT,
    TRACE_ID,
    Traces,
    attributes,
    streamed,
)

from .rig import SIMULATED, ask, cluster, known_links, prompt

__all__ = ["known_links"]


async def test_a_request_is_one_trace_from_the_clients_context_to_the_last_token() -> None:
    traces = Traces()
    async with cluster(tracer_provider=traces.provider) as here:
        answer = await streamed(here.router, sampling={"max_tokens": 30, "ignore_eos": True})
        named = await traces.whole()
    (root,) = named.pop("text_completion demo")
    assert (root.context.trace_id, root.parent and root.parent.span_id) == (TRACE_ID, PARENT_ID)
    finish = answer[-1].finish
    told = attributes(root)
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "demo"
    assert told["gen_ai.request.max_tokens"] == 30
    assert told["gen_ai.response.id"] == answer[-1].request_id
    assert told["gen_ai.response.finish_reasons"] == ("length",)
    assert told["gen_ai.usage.input_tokens"] == finish.usage.prompt_tokens
    assert told["gen_ai.usage.output_tokens"] == finish.usage.completion_tokens == 30
    assert told["gen_ai.usage.cache_read.input_tokens"] == finish.usage.cached_tokens
    assert told["gen_ai.response.time_to_first_chunk"] == pytest.approx(
        finish.timing.time_to_first_token_seconds, abs=0.05
    )
    assert (told["blockyard.outcome"], root.status.status_code) == ("OK", StatusCode.UNSET)

    order = ["admission", "tokenise", "placement", "queue", "attempt"]
    assert set(named) == {*order, "worker queue", "prefill", "decode"}
    ends = [named[name][0].end_time or 0 for name in order]
    assert ends == sorted(ends)
    (placement,), (attempt,), (prefill,), (decode,) = (
        named[name] for name in ("placement", "attempt", "prefill", "decode")
    )
    terms = attributes(placement)
    assert terms["blockyard.placement.policy"] == "prefix"
    assert terms["blockyard.placement.candidates"] == 2
    assert terms["blockyard.placement.worker"] == finish.worker_id
    assert terms["blockyard.placement.uncached_tokens"] == finish.usage.prompt_tokens
    whole_ms = sum(value for name, value in terms.items() if name.endswith("_ms"))
    assert terms["blockyard.placement.cost"] == pytest.approx(whole_ms)
    assert attributes(attempt)["blockyard.worker.id"] == finish.worker_id
    assert attributes(attempt)["blockyard.attempt.end"] == "finished"
    assert attributes(prefill) == {"blockyard.steps": 1, "blockyard.tokens": 1}
    assert attributes(decode) == {"blockyard.steps": 29, "blockyard.tokens": 29}
    assert prefill.end_time == decode.start_time
    for span in (prefill, decode):
        assert span.parent is not None
        assert span.parent.span_id == attempt.context.span_id


async def test_a_chunked_prompt_says_in_how_many_steps_it_was_computed() -> None:
    traces = Traces()
    async with cluster(("both",), tracer_provider=traces.provider, max_num_batched_tokens=256) as here:
        await ask(here.client, 1, prompt_token_ids=prompt(1, 900), max_tokens=3)
        named = await traces.whole()
    assert attributes(named["prefill"][0])["blockyard.steps"] == 4


async def test_a_request_over_http_makes_the_same_spans() -> None:
    traces = Traces()
    async with cluster(("both",), tracer_provider=traces.provider, http_port=0, **SIMULATED) as here:
        body = json.dumps({"prompt": SECRET_TEXT, "max_tokens": 5, "stream": True, "ignore_eos": True})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nTraceParent: {SAMPLED}\r\nconnection: close\r\n"
        length = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        host, _, port = here.router.server.http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write((head + length + body).encode())
        assert b"[DONE]" in await reader.read()
        writer.close()
        named = await traces.whole()
    (root,) = named["text_completion demo"]
    assert (root.context.trace_id, root.parent and root.parent.span_id) == (TRACE_ID, PARENT_ID)
    assert attributes(root)["gen_ai.usage.output_tokens"] == 5
    below = {"admission", "tokenise", "placement", "queue", "attempt", "worker queue", "prefill", "decode"}
    assert named.keys() == {root.name, *below}


async def test_a_lost_worker_makes_two_attempts_in_one_trace_and_the_second_one_says_why() -> None:
    traces = Traces()
    async with cluster(tracer_provider=traces.provider, **SIMULATED) as here:
        call = asyncio.create_task(streamed(here.router, sampling={"max_tokens": 100, "ignore_eos": True}))
        await here.until_generating(1, 10)
        (running,) = await here.router.requests()
        lost = next(one for one in here.workers if one.config.worker_id == running.worker_id)
        await die(lost)
        finish = (await call)[-1].finish
        named = await traces.whole()
    assert finish.migrations == 1
    first, second = named["attempt"]
    assert attributes(first)["blockyard.worker.id"] == lost.config.worker_id
    assert attributes(first)["blockyard.attempt.end"] == "lost"
    assert attributes(second)["blockyard.worker.id"] == finish.worker_id != lost.config.worker_id
    assert attributes(second)["blockyard.replay.reason"] == "lost"
    (replay,) = second.links
    assert (replay.context.span_id, dict(replay.attributes or {})) == (
        first.context.span_id,
        {"blockyard.replay.reason": "lost"},
    )
    tokens = [attributes(attempt)["blockyard.attempt.output_tokens"] for attempt in (first, second)]
    assert (sum(tokens), min(tokens) >= 10) == (100, True)
    (root,) = named["text_completion demo"]
    assert attributes(root)["blockyard.migrations"] == 1
    assert len(named["prefill"]) == len(named["decode"]) == 2, (
        "what the dead worker did not report ends with it"
    )
    assert named["decode"][0].end_time == first.end_time


async def die(worker: WorkerServer) -> None:
    """Cut off a worker's streams as the end of its process would."""
    assert worker._server is not None
    await worker._server.stop(None)


async def test_a_pull_is_a_span_of_the_worker_that_fetches_with_source_and_bytes(monkeypatch):
    monkeypatch.setattr(link, "PING_SECONDS", 0.05)
    traces = Traces()
    async with cluster(tracer_provider=traces.provider) as here:
        await here.drain(1)
        call = asyncio.create_task(streamed(here.router, sampling={"max_tokens": 150, "ignore_eos": True}))
        await here.until_generating(1, 60)
        await here.client.resume_worker("worker-1")
        await here.drain(0)
        await call
        named = await traces.whole()
        (report,) = here.starts[1].reports
    first, second = named["attempt"]
    assert [attributes(one)["blockyard.attempt.end"] for one in (first, second)] == ["draining", "finished"]
    assert attributes(second)["blockyard.replay.reason"] == "draining"
    (pull,) = named["pull"]
    assert pull.parent is not None
    assert pull.parent.span_id == second.context.span_id
    told = attributes(pull)
    assert told["blockyard.pull.source"] == "worker-0"
    assert told["blockyard.pull.end"] == "whole"
    assert (told["blockyard.pull.blocks"], told["blockyard.pull.bytes"]) == (
        report.num_blocks,
        report.num_bytes,
    )
    assert "blockyard.pull.saved_ms" in told
