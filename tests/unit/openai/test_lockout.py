"""Files and batches of one caller take no thread, disk or token from another."""

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import openai
import pytest
from blockyard.router import sealed_records
from blockyard.router.admission import token_file
from blockyard.router.admission.disk_turns import MAX_CALLS, DiskTurns
from blockyard.router.admission.token_entries import new_token
from blockyard.router.errors import Overloaded
from blockyard.router.openai.batches import store, upload
from blockyard.router.openai.batches.records import BatchRecord, FileRecord, Owner
from blockyard.router.openai.batches.room import LimitPassed
from blockyard.router.openai.batches.store import Store, TenantStore
from blockyard.router.sealed_records import CALLS_OF_A_TENANT, RecordName, SealedRecords

from .rig import (
    CHAT,
    Answer,
    Gateway,
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


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    """Lets blocked threads go on, at the latest when the test ends."""
    event = threading.Event()
    yield event
    event.set()


async def test_a_tenant_whose_calls_hang_on_the_disk_locks_nobody_out(
    tokens: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, go_on: threading.Event
) -> None:
    read, num_blocked = TenantStore.files, 0

    def blocked(self: TenantStore, *args: Any) -> list[FileRecord]:
        nonlocal num_blocked
        if self._files.parent.name == sha256(b"acme").hexdigest()[:32]:
            num_blocked += 1
            assert go_on.wait(60)
        return read(self, *args)

    monkeypatch.setattr(TenantStore, "files", blocked)
    monkeypatch.setattr(token_file, "POLL_SECONDS", 0.1)
    async with running_gateway(batch_dir=str(tmp_path), auth_file=str(tokens.path)) as gateway:
        calls = [asyncio.create_task(listed(gateway, tokens.of["ann"])) for _ in range(MAX_CALLS + 8)]
        try:
            await until(lambda: sum(call.done() for call in calls) >= 8, seconds=60)
            for call in calls:
                if call.done():
                    told = call.result()
                    assert (told.status, told.error["code"]) == (429, "overloaded")
                    assert told.headers["retry-after"]
            assert num_blocked == 1, "one thread for one client"
            for name in ("bob", "ada"):
                assert (await listed(gateway, tokens.of[name])).status == 200
            added, entry = new_token("new", "user", None)
            tokens.entries.append(entry)
            tokens.write()
            await until(lambda: accepts(gateway, added), seconds=60)
        finally:
            go_on.set()
        assert {call.status for call in await asyncio.gather(*calls)} == {200, 429}


async def listed(gateway: Gateway, token: str) -> Answer:
    return await gateway.get("/v1/files", authorization=f"Bearer {token}")


async def accepts(gateway: Gateway, token: str) -> bool:
    return (await listed(gateway, token)).status == 200


def add_files(tenant: TenantStore, count: int) -> None:
    for _ in range(count):
        record = FileRecord(
            id=store.drawn_file_id(), filename="f", purpose="batch", num_bytes=1, created_at=1
        )
        tenant.add_file(record)


def add_batches(tenant: TenantStore, count: int) -> None:
    one = BatchRecord(
        id=store.drawn_batch_id(),
        owner=Owner(tenant=""),
        endpoint=CHAT,
        input_file_id=store.drawn_file_id(),
        completion_window="24h",
        created_at=1,
        expires_at=2,
        output_file_id=store.drawn_file_id(),
        error_file_id=store.drawn_file_id(),
        status="completed",
    )
    for _ in range(count):
        tenant.save(replace(one, id=store.drawn_batch_id()))


async def test_a_page_of_a_list_reads_no_record_but_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = Store(tmp_path).of("")
    add_files(tenant, 40)
    add_batches(tenant, 40)
    reads: list[Path] = []
    read_bytes = Path.read_bytes

    def noted(self: Path) -> bytes:
        if self.is_relative_to(tmp_path):
            reads.append(self)
        return read_bytes(self)

    async with running_gateway(batch_dir=str(tmp_path)) as gateway, gateway.client() as client:
        # The folder's owner has read the batches by then, or reads none any more.
        await uploaded(client, b"{}")
        monkeypatch.setattr(Path, "read_bytes", noted)
        for path in ("files", "batches"):
            del reads[:]
            page = await gateway.get(f"/v1/{path}?limit=3")
            assert (page.status, len(reads)) == (200, 4), "one more shows whether another page follows"


def test_batches_that_have_ended_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = Store(tmp_path).of("")
    add_batches(tenant, 20)
    assert not tenant.reads("file-x")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda _: pytest.fail("a record is read again"))
        assert not tenant.reads("file-x")
        assert tenant.unfinished() == []


async def test_a_client_has_one_thread_and_its_work_runs_in_order(go_on: threading.Event) -> None:
    turns, done = DiskTurns(2), list[int]()
    first = turns.submit("a", go_on.wait, 60)
    later = [turns.submit("a", done.append, number) for number in range(5)]
    assert later[3].cancel()
    for client in ("b", "c"):
        await asyncio.wait_for(asyncio.wrap_future(turns.submit(client, int)), 30)
    assert done == []
    go_on.set()
    await asyncio.wrap_future(later[4])
    assert (first.result(), done) == (True, [0, 1, 2, 4])
    failed = turns.submit("a", int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        await asyncio.wrap_future(failed)


async def test_one_client_leaves_turns_of_uploading_to_others() -> None:
    uploads = upload.Uploads()
    async with asyncio.TaskGroup() as tasks:
        is_over = asyncio.Event()

        async def hold(client: str) -> None:
            async with uploads.turn(client):
                await is_over.wait()

        for _ in range(upload.MAX_OF_A_CLIENT):
            tasks.create_task(hold("a"))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="of this client"):
            async with uploads.turn("a"):
                pass
        async with uploads.turn("b"):
            is_over.set()


def lines_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/files/*") if path.suffix != ".json")


@dataclass
class FakeUsage:
    """A disk on which the files of a folder have used some of the space."""

    folder: Path
    size: int

    def __call__(self, _: Any) -> Any:
        free = self.size - lines_bytes(self.folder)
        return shutil._ntuple_diskusage(self.size, self.size - free, free)  # type: ignore[attr-defined]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("limit", ["storage_limit", "disk_full"])
async def test_answers_keep_the_promised_room_and_the_batch_says_why_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    async with (
        running_gateway(batch_dir=str(tmp_path)) as gateway,
        served_by(gateway, worker_of_model("a")),
        gateway.client() as client,
        gateway.client(default_headers={"blockyard-tenant": "other"}) as other,
    ):
        lines = jsonl(*(line(f"r{number}", max_tokens=20) for number in range(20)))
        batch = await client.batches.create(
            input_file_id=(await uploaded(client, lines)).id, endpoint=CHAT, completion_window="24h"
        )
        room = lines_bytes(tmp_path) + 4000
        if limit == "storage_limit":
            monkeypatch.setattr(store, "MAX_TENANT_BYTES", room)
        else:
            monkeypatch.setattr(store, "LEAST_FREE_BYTES", 1000)
            monkeypatch.setattr(shutil, "disk_usage", FakeUsage(tmp_path, room + 1000))
        done = await ended(client, batch)
        assert lines_bytes(tmp_path) <= room
        counts = done.request_counts
        assert counts is not None
        assert done.errors is not None
        told = (done.errors.data or [])[0]
        assert (done.status, told.code, told.line) == ("failed", limit, None)
        assert "have no answer" in (told.message or "")
        assert 0 < counts.completed < counts.total == 20
        found = await answers(client, done.output_file_id)
        assert len(found) == counts.completed
        assert all(one["response"]["status_code"] == 200 for one in found.values())
        monkeypatch.undo()
        assert (await ended(other, await started(other, jsonl(line("a"))))).status == "completed"
        assert (await ended(client, await started(client, jsonl(line("a"))))).status == "completed"


async def test_lines_of_a_cancelled_batch_keep_the_promised_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_gateway(batch_dir=str(tmp_path)) as gateway, gateway.client() as client:
        batch = await started(client, jsonl(*(line(f"r{number}") for number in range(40))))
        room = lines_bytes(tmp_path) + 1000
        monkeypatch.setattr(store, "MAX_TENANT_BYTES", room)
        await client.batches.cancel(batch.id)
        done = await ended(client, batch)
        assert lines_bytes(tmp_path) <= room
        assert done.status in ("failed", "cancelled")
        assert [one.code for one in (done.errors and done.errors.data) or ()] == ["storage_limit"]
        assert 0 < len(await answers(client, done.error_file_id)) < 40


async def test_uploads_that_arrive_together_keep_the_promised_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_TENANT_BYTES", 1000)
    async with running_gateway(batch_dir=str(tmp_path)) as gateway, gateway.client() as client:
        sent = [uploaded(client, b"x" * 400) for _ in range(4)]
        outcomes = await asyncio.gather(*sent, return_exceptions=True)
        refused = [one for one in outcomes if isinstance(one, openai.RateLimitError)]
        assert (len(refused), {one.code for one in refused}) == (2, {"batch_limit"})
        await until(lambda: not list(tmp_path.glob("*/files/*.part")), seconds=60)
        assert lines_bytes(tmp_path) == 800
        with pytest.raises(openai.RateLimitError):
            await uploaded(client, b"x" * 201)
        await uploaded(client, b"x" * 200)


async def test_files_of_answers_count_before_they_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_TENANT_FILES", 4)
    async with running_gateway(batch_dir=str(tmp_path)) as gateway, gateway.client() as client:
        batch = await started(client, jsonl(line("a")))
        for wanted in (
            started(client, b"{}"),
            client.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.RateLimitError) as refused:
                await wanted
            assert refused.value.code == "batch_limit"


def test_what_an_interrupted_router_left_takes_no_room_for_ever(tmp_path: Path) -> None:
    tenant = Store(tmp_path).of("")
    add_files(tenant, 1)
    (kept,) = tenant.files()
    left = [tenant.path(store.drawn_file_id()), tenant.path(store.drawn_file_id()).with_suffix(".part")]
    for path in (tenant.path(kept.id), *left):
        path.write_bytes(b"x")
        os.utime(path, (0, 0))
    new = tenant.path(store.drawn_file_id())
    new.write_bytes(b"x")
    tenant.check_upload()
    assert [path.exists() for path in (tenant.path(kept.id), new, *left)] == [True, True, False, False]


def test_a_tenant_leaves_as_much_of_the_disk_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LEAST_FREE_BYTES", 0)
    monkeypatch.setattr(store, "MAX_FILE_BYTES", 100)
    monkeypatch.setattr(shutil, "disk_usage", FakeUsage(tmp_path, 1000))
    batches = Store(tmp_path)
    for name, num_bytes in (("a", 500), ("b", 250), ("c", 125)):
        sent = batches.of(name).upload(store.drawn_file_id())
        sent.begin()
        sent.write(b"x" * num_bytes)
        with pytest.raises(LimitPassed, match="no room for more files of this tenant"):
            sent.write(b"x")


async def test_a_tenant_that_waits_for_its_responses_takes_no_turn_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sealed_records, "TIMEOUT_SECONDS", 60.0)
    is_asked, go_on = asyncio.Queue[None](), asyncio.Event()

    class SlowRedis:
        async def getex(self, *_: Any, **__: Any) -> None:
            is_asked.put_nowait(None)
            await go_on.wait()

    client: Any = SlowRedis()
    records = SealedRecords([client], cluster="c", secret="of-the-cluster")
    async with asyncio.TaskGroup() as tasks:

        def read(tenant: str) -> asyncio.Task[bytes | None]:
            return tasks.create_task(records.get(RecordName(kind="k", tenant=tenant, record_id="r")))

        of_one = [read("one") for _ in range(300)]
        for _ in range(CALLS_OF_A_TENANT):
            await is_asked.get()
        other = read("other")
        await asyncio.wait_for(is_asked.get(), 60)
        assert is_asked.empty()
        go_on.set()
        assert await other is None
        assert await asyncio.gather(*of_one) == [None] * 300, "waiting for a turn is no failure of Redis"
