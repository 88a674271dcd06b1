"""Files of batches by OpenAI's own client: uploads, limits of a tenant, lists, and records that cannot be read."""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import openai
import pytest
from blockyard.router.openai.batches import handlers, runner, store, upload
from blockyard.router.openai.batches.records import BatchRecord, Owner, Query
from openai import AsyncOpenAI

from .rig import CHAT, Gateway, ended, jsonl, line, running_gateway, started, until, uploaded


@pytest.mark.asyncio(loop_scope="module")
async def test_a_file_comes_back_as_it_went(batch_client: AsyncOpenAI) -> None:
    content = jsonl(line("a")) * 3000
    made = await batch_client.files.create(file=("../../etc/passwd", content), purpose="batch")
    assert (made.bytes, made.purpose, made.status) == (len(content), "batch", "processed")
    assert made.object == "file"
    assert (await batch_client.files.content(made.id)).content == content
    assert await batch_client.files.retrieve(made.id) == made
    others = [await uploaded(batch_client, b"{}\n") for _ in range(3)]
    listed = [one.id async for one in batch_client.files.list(limit=2, purpose="batch")]
    assert {made.id, *(one.id for one in others)} <= set(listed)
    assert len(listed) == len(set(listed))
    assert (await batch_client.files.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError) as refused:
        await batch_client.files.content(made.id)
    assert refused.value.code == "file_not_found"


@pytest.mark.parametrize(
    "file_id", ["..", "%2e%2e", "..%2f..%2fowner.lock", "file-" + "g" * 32, "file-" + "0" * 32, "", "\u00e4"]
)
@pytest.mark.asyncio(loop_scope="module")
async def test_an_id_that_is_not_ours_finds_nothing(batching: Gateway, file_id: str) -> None:
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{file_id}"):
        for verb in ("GET", "DELETE", "POST"):
            answer = await batching.raw(f"{verb} {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            assert answer.status in (400, 404, 405), (verb, path)


def part(disposition: str, content: bytes) -> bytes:
    return f"--b\r\nContent-Disposition: form-data; {disposition}\r\n\r\n".encode() + content + b"\r\n"


FILE, PURPOSE = part('name="file"; filename="f"', b"{}"), part('name="purpose"', b"batch")
FORM = "multipart/form-data; boundary=b"


@pytest.mark.parametrize(
    ("body", "media_type", "status"),
    [
        (b"x", "application/json", 415),
        (b"x", "multipart/form-data", 415),
        (b"x", "multipart/form-data; boundary=", 400),
        (b"x", FORM, 400),
        (b"--b\r\n\r\nx\r\n--b--\r\n", FORM, 400),
        (b"--b--\r\n", FORM, 400),
        (b"--b\r\n" * 100, FORM, 400),
        (FILE + b"--b--\r\n", FORM, 400),
        (PURPOSE + b"--b--\r\n", FORM, 400),
        (PURPOSE + FILE + FILE + b"--b--\r\n", FORM, 400),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_an_upload_that_is_none_is_refused(
    batching: Gateway, body: bytes, media_type: str, status: int
) -> None:
    answer = await batching.post(body, "/v1/files", content_type=media_type)
    assert answer.status == status
    assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("newest_first", [True, False])
def test_a_list_goes_on_behind_an_object_that_was_deleted(newest_first: bool) -> None:
    ids = [f"file-{number:032x}" for number in range(6)]
    expected = sorted(ids, reverse=newest_first)
    for at, deleted in enumerate(expected):
        query = Query(after=deleted, newest_first=newest_first)
        assert query.in_order(one for one in ids if one != deleted) == expected[at + 1 :]


def test_a_record_that_cannot_be_read_hides_no_other_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batches = store.Store(tmp_path)
    tenant = batches.of("a")
    kept = BatchRecord(
        id=store.drawn_batch_id(),
        owner=Owner(tenant="a"),
        endpoint=CHAT,
        input_file_id=store.drawn_file_id(),
        completion_window="24h",
        created_at=1,
        expires_at=2,
        output_file_id=store.drawn_file_id(),
        error_file_id=store.drawn_file_id(),
    )
    tenant.create(kept)
    (saved,) = tmp_path.glob("*/batches/*.json")
    contents = ("", "{}", "[]", '{"id": 1}', "null")
    for content in contents:
        harmed = store.drawn_batch_id()
        (saved.parent / f"{harmed}.json").write_text(content)
        assert tenant.batch(harmed) is None
    for _ in range(2):
        assert [one.id for one in tenant.batches()] == [one.id for one in batches.unfinished()] == [kept.id]
    logged = [record for record in caplog.records if "cannot be read" in record.getMessage()]
    assert len(logged) == len(contents)


WRONG = {
    "limit": ("0", "1001", "x", "", "-1", "000000001" + "9" * 5000),
    "after": ("", "x", "../owner.lock", "file-1"),
    "order": ("up",),
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_query_of_a_list_is_refused(batching: Gateway, name: str) -> None:
    for path in ("/v1/files", "/v1/batches"):
        for value in WRONG[name]:
            answer = await batching.get(f"{path}?{name}={value}")
            assert (answer.status, answer.error["param"]) == (400, name), value


@pytest.mark.asyncio(loop_scope="module")
async def test_an_upload_whose_client_goes_at_its_end_leaves_no_file_without_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_syncing, may_sync, has_ended = threading.Event(), threading.Event(), asyncio.Event()
    upload_as_it_is = handlers.BatchRoutes._upload

    async def noted(self: handlers.BatchRoutes, request: Any) -> Any:
        try:
            return await upload_as_it_is(self, request)
        finally:
            has_ended.set()

    def slow(descriptor: int) -> None:
        is_syncing.set()
        assert may_sync.wait(30)

    monkeypatch.setattr(handlers.BatchRoutes, "_upload", noted)
    async with running_gateway(batch_dir=str(tmp_path)) as gateway, gateway.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", slow)
            sending = asyncio.create_task(uploaded(client, b"{}\n"))
            assert await asyncio.to_thread(is_syncing.wait, 30)
            sending.cancel()
            async with asyncio.timeout(30):
                await has_ended.wait()
            may_sync.set()
            await until(lambda: bool(list(tmp_path.glob("*/files/*.jsonl"))))
            await until(lambda: bool(list(tmp_path.glob("*/files/*.json"))))
        (record,) = [one async for one in client.files.list()]
        assert (await client.files.content(record.id)).content == b"{}\n"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_web_page_may_not_upload(batching: Gateway) -> None:
    answer = await batching.post(
        b"--b--", "/v1/files", content_type="multipart/form-data; boundary=b", origin="https://evil.example"
    )
    assert (answer.status, answer.error["code"]) == (403, "permission_denied")


@pytest.mark.asyncio(loop_scope="module")
async def test_limits_of_a_tenant_are_told(
    batching: Gateway, batch_client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await uploaded(batch_client, jsonl(line("a")))
    body: dict[str, Any] = {"input_file_id": source.id, "endpoint": CHAT, "completion_window": "24h"}
    with monkeypatch.context() as patch:
        patch.setattr(upload, "MAX_FILE_BYTES", 10)
        with pytest.raises(openai.APIStatusError) as large:
            await uploaded(batch_client, b"x" * 20_000)
    assert (large.value.status_code, large.value.code) == (413, "body_too_large")
    for name in ("MAX_TENANT_FILES", "MAX_TENANT_BYTES"):
        with monkeypatch.context() as patch:
            patch.setattr(store, name, 1)
            with pytest.raises(openai.RateLimitError) as many:
                await uploaded(batch_client, b"{}")
            assert many.value.code == "batch_limit"
    with monkeypatch.context() as patch:
        patch.setattr(store, "MAX_UNFINISHED", 0)
        with pytest.raises(openai.RateLimitError):
            await batch_client.batches.create(**body)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "MAX_LINES", 1)
        done = await ended(batch_client, await started(batch_client, jsonl(line("a"), line("b"))))
    assert done.errors is not None
    assert done.errors.data is not None
    assert [error.code for error in done.errors.data] == ["too_many_lines"]
