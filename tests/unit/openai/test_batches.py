"""Files and batches by OpenAI's own client: each line is answered once, and what is wrong is told with its line."""

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import openai
import pytest
from blockyard.router.openai.batches import handlers, runner, store
from blockyard.router.openai.batches.answer_file import Answers
from blockyard.router.openai.batches.lines import unanswered_line
from blockyard.router.openai.batches.records import BatchRecord
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

from .rig import (
    CHAT,
    COMPLETIONS,
    Gateway,
    Script,
    Tokens,
    answers,
    ended,
    jsonl,
    line,
    running_gateway,
    served_by,
    started,
    until,
    uploaded,
    worker_of_model,
)


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
@pytest.mark.asyncio(loop_scope="module")
async def test_each_line_is_answered_once_and_a_refused_one_has_the_routes_error(
    batch_client: AsyncOpenAI, url: str
) -> None:
    wrong = [line("model", url=url, model="x"), line("range", url=url, temperature=-1)]
    wrong += [line("stream", url=url, stream=True), line("name", url=url, nobody_knows=1)]
    good = [line(f"r{number}", url=url) for number in range(30)]
    batch = await started(batch_client, jsonl(*good[:9], b"\n", *wrong, *good[9:]), url, metadata={"k": "v"})
    assert (batch.status, batch.endpoint, batch.completion_window) == ("validating", url, "24h")
    done = await ended(batch_client, batch)
    assert (done.status, done.metadata, done.errors) == ("completed", {"k": "v"}, None)
    counts = done.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (34, 30, 4)
    assert done.completed_at is not None
    assert done.in_progress_at is not None
    found = await answers(batch_client, done.output_file_id)
    assert found.keys() == {f"r{number}" for number in range(30)}
    for one in found.values():
        assert (one["error"], one["response"]["status_code"]) == (None, 200)
        assert one["response"]["body"]["usage"]["completion_tokens"] == 3
        assert one["response"]["request_id"].startswith("req-")
    errors = await answers(batch_client, done.error_file_id)
    told = {
        name: (one["response"]["status_code"], one["response"]["body"]["error"])
        for name, one in errors.items()
    }
    assert {name: (status, error["code"], error["param"]) for name, (status, error) in told.items()} == {
        "model": (404, "model_not_found", "model"),
        "range": (400, "invalid_request", "temperature"),
        "stream": (400, "unsupported", "stream"),
        "name": (400, "invalid_request", "nobody_knows"),
    }
    made = await batch_client.files.retrieve(done.output_file_id or "")
    assert (made.purpose, made.filename) == ("batch_output", f"{batch.id}_output.jsonl")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_file_with_lines_that_are_no_requests_fails_with_their_numbers(
    batch_client: AsyncOpenAI,
) -> None:
    unnamed = line("x")
    del unnamed["custom_id"]
    lines = [line("a"), b"nonsense\n", b"[]\n", unnamed, line("a"), b"\n", {**line("m"), "method": "GET"}]
    lines += [line("u", url=COMPLETIONS), {**line("b"), "body": 1}, line(""), line("\ud800"), b'{"a": ']
    done = await ended(batch_client, await started(batch_client, jsonl(*lines)))
    assert done.errors is not None
    assert done.errors.data is not None
    assert [(error.line, error.code) for error in done.errors.data] == [
        (2, "invalid_json_line"),
        (3, "invalid_json_line"),
        (4, "missing_required_parameter"),
        (5, "duplicate_custom_id"),
        (7, "invalid_method"),
        (8, "invalid_url"),
        (9, "invalid_body"),
        (10, "invalid_custom_id"),
        (11, "invalid_custom_id"),
        (12, "invalid_json_line"),
    ]
    assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
    empty = await ended(batch_client, await started(batch_client, b"\n\n"))
    assert empty.errors is not None
    assert empty.errors.data is not None
    assert [error.code for error in empty.errors.data] == ["empty_file"]


@pytest.mark.asyncio(loop_scope="module")
async def test_lines_have_the_lowest_priority_and_are_bounded_in_number(tmp_path: Path) -> None:
    running: list[int] = []

    def scripted(submit: Any) -> Script:
        running.append(worker.num_running)
        return Script()

    worker = worker_of_model("b", script=scripted)
    async with (
        running_gateway(batch_dir=str(tmp_path), max_requests=64) as gateway,
        served_by(gateway, worker),
        gateway.client() as client,
    ):
        batch = await started(client, jsonl(*(line(f"r{number}") for number in range(80))))
        assert (await ended(client, batch)).status == "completed"
    assert len(worker.submits) == 80
    assert {submit.priority for submit in worker.submits} == {100}
    assert max(running) <= 16, "a part of max_requests"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_cancelled_batch_keeps_its_answers_and_names_the_others(
    batching: Gateway, batch_client: AsyncOpenAI
) -> None:
    count = 100
    lines = [line(f"r{number}", max_tokens=1900, ignore_eos=True) for number in range(count)]
    batch = await started(batch_client, jsonl(*lines))
    source = batch.input_file_id
    await until(lambda: batching.router.server.readings.get("router_running", 1))
    with pytest.raises(openai.ConflictError):
        await batch_client.files.delete(source)
    while not (await batch_client.batches.retrieve(batch.id)).in_progress_at:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    behind = await started(batch_client, jsonl(line("a")))
    await batch_client.batches.cancel(behind.id)
    assert (await ended(batch_client, behind)).status == "cancelled", "before the first one has ended"
    assert (await batch_client.batches.cancel(batch.id)).status == "cancelling"
    done = await ended(batch_client, batch)
    counts = done.request_counts
    assert counts is not None
    assert (done.status, counts.completed + counts.failed) == ("cancelled", count)
    errors = await answers(batch_client, done.error_file_id)
    assert {one["error"]["code"] for one in errors.values()} == {"batch_cancelled"}
    good = await answers(batch_client, done.output_file_id) if counts.completed else {}
    assert good.keys() | errors.keys() == {f"r{number}" for number in range(count)}
    with pytest.raises(openai.ConflictError) as refused:
        await batch_client.batches.cancel(batch.id)
    assert refused.value.code == "conflict"
    assert (await batch_client.files.delete(source)).deleted


@pytest.mark.asyncio(loop_scope="module")
async def test_a_batch_that_has_ended_runs_no_second_time_by_an_older_list(
    batch_client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: dict[str, BatchRecord] = {}
    num_looks = 0
    listed = store.Store.unfinished

    def older(self: store.Store) -> list[BatchRecord]:
        nonlocal num_looks
        num_looks += 1
        for record in listed(self):
            known.setdefault(record.id, record)
        return list(known.values())

    monkeypatch.setattr(store.Store, "unfinished", older)
    done = await ended(batch_client, await started(batch_client, jsonl(line("a"), line("b"))))
    assert done.status == "completed"
    assert done.id in known
    assert (await batch_client.files.delete(done.input_file_id)).deleted
    looks = num_looks
    await until(lambda: num_looks > looks + 2)
    assert await batch_client.batches.retrieve(done.id) == done
    assert len(await answers(batch_client, done.output_file_id)) == 2


async def fails(*_: Any) -> None:
    raise RuntimeError("a line of the client")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_batch_on_which_the_router_fails_keeps_its_answers(
    batch_client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.Runner, "_end", fails)
    failed = await ended(batch_client, await started(batch_client, jsonl(line("a"), line("b"))))
    assert failed.status == "failed"
    assert failed.errors is not None
    assert [error.code for error in failed.errors.data or ()] == ["internal"]
    assert len(await answers(batch_client, failed.output_file_id)) == 2


@pytest.mark.asyncio(loop_scope="module")
async def test_a_failure_that_cannot_be_saved_is_logged(
    batch_client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def is_full(*_: Any) -> None:
        raise OSError("a path of the router")

    with monkeypatch.context() as patch:
        patch.setattr(runner.Runner, "_end", fails)
        patch.setattr(runner, "_publish", is_full)
        batch = await started(batch_client, jsonl(line("a")))
        await until(lambda: f"the failure of batch {batch.id} is not saved: OSError" in caplog.messages)
    assert (await ended(batch_client, batch)).status == "completed"


@pytest.mark.asyncio(loop_scope="module")
async def test_batches_are_listed_newest_first_in_pages(batch_client: AsyncOpenAI) -> None:
    made = [await started(batch_client, jsonl(line("a"))) for _ in range(3)]
    listed = [one.id async for one in batch_client.batches.list(limit=2)]
    ids = [one.id for one in made]
    assert [one for one in listed if one in ids] == ids[::-1]
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-" + "0" * 32}, "input_file_id"),
        ({"input_file_id": "../owner.lock"}, "input_file_id"),
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"metadata": {f"k{number}": "" for number in range(17)}}, "metadata"),
        ({"nobody_knows": 1}, "nobody_knows"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_batch_that_cannot_be_is_refused_by_its_field(
    batching: Gateway, batch_client: AsyncOpenAI, fields: dict[str, Any], param: str
) -> None:
    source = await uploaded(batch_client, jsonl(line("a")))
    body = {"input_file_id": source.id, "endpoint": CHAT, "completion_window": "24h", **fields}
    answer = await batching.post(body, "/v1/batches")
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_batch_that_expires_names_the_lines_without_an_answer(
    batching: Gateway, batch_client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "WINDOW_SECONDS", 1)
    lines = [line("short"), *(line(f"r{number}", max_tokens=1900, ignore_eos=True) for number in range(20))]
    done = await ended(batch_client, await started(batch_client, jsonl(*lines)))
    assert done.status == "expired"
    assert done.expired_at is not None
    errors = await answers(batch_client, done.error_file_id)
    assert {one["error"]["code"] for one in errors.values()} == {"batch_expired"}
    good = await answers(batch_client, done.output_file_id) if done.output_file_id else {}
    assert good.keys() | errors.keys() == {one["custom_id"] for one in lines}


@pytest.mark.asyncio(loop_scope="module")
async def test_without_a_folder_the_routes_say_that_batches_are_off(gateway: Gateway) -> None:
    for path in ("/v1/files", "/v1/batches", "/v1/files/x/content", "/v1/batches/x"):
        answer = await gateway.get(path)
        assert (answer.status, answer.error["code"]) == (501, "batches_off")
        assert "--batch-dir" in answer.error["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_tenant_finds_only_its_own(tokens: Tokens, tmp_path: Path) -> None:
    async with running_gateway(batch_dir=str(tmp_path), auth_file=str(tokens.path)) as gateway:
        worker = worker_of_model("a")
        async with (
            served_by(gateway, worker),
            gateway.client(api_key=tokens.of["ann"]) as ann,
            gateway.client(api_key=tokens.of["bob"]) as bob,
            gateway.client(api_key=tokens.of["vic"]) as viewer,
        ):
            with pytest.raises(openai.PermissionDeniedError):
                await viewer.files.list()
            batch = await started(ann, jsonl(line("a"), line("b")))
            done = await ended(ann, batch)
            assert (done.status, done.output_file_id is not None) == ("completed", True)
            for call in (
                bob.files.retrieve(batch.input_file_id),
                bob.files.content(done.output_file_id or ""),
                bob.files.delete(batch.input_file_id),
                bob.batches.retrieve(batch.id),
                bob.batches.cancel(batch.id),
            ):
                with pytest.raises(openai.NotFoundError):
                    await call
            assert [one async for one in bob.files.list()] == []
            assert [one async for one in bob.batches.list()] == []
            with pytest.raises(openai.BadRequestError):
                await bob.batches.create(
                    input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
                )


@pytest.mark.asyncio(loop_scope="module")
async def test_of_two_routers_of_a_folder_one_runs_the_batches_and_both_answer(tmp_path: Path) -> None:
    async with (
        running_gateway(batch_dir=str(tmp_path)) as first,
        first.router.workers(worker_of_model("a")),
        first.client() as client,
    ):
        await ended(client, await started(client, jsonl(line("a"))))
        async with running_gateway(batch_dir=str(tmp_path)) as second, second.client() as other:
            batch = await started(other, jsonl(line("a"), line("b")))
            done = await ended(other, batch)
            assert done.status == "completed"
            assert done == await client.batches.retrieve(batch.id)
            assert (await answers(other, done.output_file_id)).keys() == {"a", "b"}


@given(
    answered=st.lists(st.text(max_size=4), unique=True, max_size=6),
    cut=st.integers(min_value=0, max_value=200),
    tail=st.binary(max_size=20),
)
def test_an_answer_file_keeps_whole_lines_wherever_it_was_cut(
    answered: list[str], cut: int, tail: bytes
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        good, bad = Path(folder) / "good", Path(folder) / "bad"
        lines = [unanswered_line(name, code="c", message="m") for name in answered]
        content = b"".join(lines)
        good.write_bytes(content[:cut] + tail)
        files = Answers(good, bad)
        for name, text in zip(answered, lines, strict=True):
            files.append(name, text, is_good=True)
            files.append(name, text, is_good=False)
        files.close()
        files.append("late", b"x", is_good=True)
        found = [json.loads(text)["custom_id"] for text in good.read_bytes().splitlines()]
        assert sorted(set(found)) == sorted(found)
        assert set(answered) <= set(found)
        assert bad.read_bytes() == b""
