"""Handlers of /v1/files and /v1/batches, over the folder of batches.

A caller finds only what its tenant has. Does not own the running of batches (runner.py), permissions or errors' way
out (../routes.py).
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar

from aiohttp.web import BaseRequest, Response, StreamResponse
from blockyard.router.admission.auth import PRINCIPAL
from blockyard.router.admission.disk_turns import DiskTurns
from blockyard.router.calls.bounds import Caller
from blockyard.router.calls.generating import Calls
from blockyard.router.calls.intake import Intake
from blockyard.router.errors import Forbidden, InvalidRequest
from blockyard.router.openai.batches.fields import CREATE_FIELDS, WINDOW, checked_metadata
from blockyard.router.openai.batches.line_calls import LineCalls
from blockyard.router.openai.batches.paths import BATCHES, DEFAULT_LIMITS, FILES, MAX_PAGE
from blockyard.router.openai.batches.records import (
    BatchRecord,
    FileRecord,
    Owner,
    Query,
    page_document,
)
from blockyard.router.openai.batches.room import LimitPassed
from blockyard.router.openai.batches.runner import Runner
from blockyard.router.openai.batches.store import (
    Store,
    TenantStore,
    drawn_batch_id,
    drawn_file_id,
    is_id_here,
)
from blockyard.router.openai.batches.upload import Uploads, receive
from blockyard.router.openai.http.body import read_json
from blockyard.router.openai.http.call import CallNotes, http_call
from blockyard.router.openai.http.errors import BatchLimit, Conflict, NoSuchBatch, NoSuchFile
from blockyard.router.openai.http.json_response import json_response
from blockyard.router.openai.requests.fields import given, refuse_others, text

WINDOW_SECONDS = 24 * 3600
LIMIT = re.compile(r"[0-9]{1,4}")
CONTENT_BYTES = 256 * 1024

Headed = Callable[[StreamResponse, BaseRequest, CallNotes], None]
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Desk:
    """Store of a call's tenant, and the caller's turns on the disk."""

    store: TenantStore
    caller: Caller
    turns: DiskTurns

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work in a thread. A caller that is cancelled drops the work unless it has begun."""
        return await self.begun(work, *args, **kwargs)

    def begun(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Return the future of work that runs in a thread, whether or not anybody awaits it."""
        return asyncio.wrap_future(self.turns.submit(self.caller.client, work, *args, **kwargs))


class BatchRoutes:
    """Files and batches of one gateway."""

    def __init__(self, folder: Path, calls: Calls, line_calls: LineCalls, intake: Intake) -> None:
        self._store = Store(folder)
        self._calls, self._intake, self._endpoints = calls, intake, line_calls.endpoints
        self._turns, self._uploads = DiskTurns(), Uploads()
        self.runner = Runner(self._store, calls, line_calls)

    # Files

    async def files(self, request: BaseRequest, notes: CallNotes) -> StreamResponse:
        if request.method == "POST":
            return await self._upload(request)
        query, limit = _query(request, FILES)
        async with self._admitted(request) as desk:
            records = await desk.run(desk.store.files, query)
        return _page([record.shown() for record in records], limit)

    async def file(self, request: BaseRequest, notes: CallNotes) -> StreamResponse:
        async with self._admitted(request) as desk:
            record = await _found_file(desk, request)
            if request.method == "GET":
                return json_response(record.shown())
            if await desk.run(desk.store.reads, record.id):
                raise Conflict("a batch that has not ended reads this file")
            await desk.run(desk.store.remove_file, record.id)
        return json_response({"id": record.id, "object": "file", "deleted": True})

    async def content(self, request: BaseRequest, notes: CallNotes, headed: Headed) -> StreamResponse:
        """Stream the lines of a file. Cut off a client that does not read."""
        async with self._admitted(request) as desk:
            record = await _found_file(desk, request)
        response = StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        response.content_length = record.num_bytes
        # Counted apart from other calls, which a tenant with slow readers can still make.
        with (
            self._turns.call(f"{desk.caller.client}\0content"),
            await desk.run(_opened, desk.store.path(record.id)) as file,
        ):
            headed(response, request, notes)
            try:
                await self._read_by_client(response.prepare(request))
                while piece := await desk.run(_piece, file):
                    await self._read_by_client(response.write(piece))
                await self._read_by_client(response.write_eof())
            except TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
        return response

    async def _read_by_client(self, sending: Awaitable[Any]) -> None:
        async with asyncio.timeout(self._calls.slow_reader_seconds):
            await sending

    async def _upload(self, request: BaseRequest) -> Response:
        if "Origin" in request.headers:
            # A browser sends such a body without asking the server first.
            raise Forbidden("web pages may not upload files")
        desk, file_id = self._desk(request), drawn_file_id()
        async with self._uploads.turn(desk.caller.client):
            upload = desk.store.upload(file_id)
            try:
                await desk.run(upload.begin)
                filename, num_bytes = await receive(request, lambda piece: desk.run(upload.write, piece))
                record = FileRecord(
                    id=file_id,
                    filename=filename,
                    purpose="batch",
                    num_bytes=num_bytes,
                    created_at=int(time.time()),
                )
                # To its end, so that no file stays without a record, which nobody could see or delete.
                await asyncio.shield(desk.begun(upload.keep, record))
            except LimitPassed as error:
                raise BatchLimit(str(error)) from None
            finally:
                # Nobody waits for it: the client may be gone.
                desk.begun(upload.discard)
        return json_response(record.shown())

    # Batches

    async def batches(self, request: BaseRequest, notes: CallNotes) -> StreamResponse:
        if request.method == "POST":
            return await self._create(request)
        query, limit = _query(request, BATCHES)
        async with self._admitted(request) as desk:
            shown = await desk.run(_shown_batches, desk.store, query)
        return _page(shown, limit)

    async def batch(self, request: BaseRequest, notes: CallNotes) -> StreamResponse:
        async with self._admitted(request) as desk:
            return await _shown(desk, await _found_batch(desk, request))

    async def cancel(self, request: BaseRequest, notes: CallNotes) -> StreamResponse:
        # Not admitted first: a router that is full should hear of work that is not wanted any more.
        desk = self._desk(request)
        record = await _found_batch(desk, request)
        if record.has_ended:
            raise Conflict(f"the batch has ended: it is {record.status}")
        await desk.run(desk.store.cancel, record.id)
        self.runner.look()
        return await _shown(desk, record)

    async def _create(self, request: BaseRequest) -> Response:
        call = http_call(request, default_timeout_seconds=self._calls.bounds.default_timeout_seconds)
        with self._intake.charge(call.peer()) as charge:
            body = await read_json(request, charge, max_model_len=self._calls.groups.max_model_len)
        refuse_others(body, CREATE_FIELDS)
        for name, allowed in (("endpoint", self._endpoints), ("completion_window", (WINDOW,))):
            if text(name, body.get(name)) not in allowed:
                raise InvalidRequest.of(name, f"must be {' or '.join(allowed)}")
        input_file_id = text("input_file_id", body.get("input_file_id"))
        metadata = checked_metadata(given(body, "metadata", CREATE_FIELDS["metadata"]))
        async with self._admitted(request) as desk:
            source = await desk.run(desk.store.file, input_file_id)
            if source is None or source.purpose != "batch":
                raise InvalidRequest.of("input_file_id", "must be a file with the purpose batch")
            now = int(time.time())
            record = BatchRecord(
                id=drawn_batch_id(),
                owner=_owner(desk.caller),
                endpoint=body["endpoint"],
                input_file_id=input_file_id,
                completion_window=WINDOW,
                created_at=now,
                expires_at=now + WINDOW_SECONDS,
                output_file_id=drawn_file_id(),
                error_file_id=drawn_file_id(),
                metadata=metadata,
            )
            try:
                await desk.run(desk.store.create, record)
            except LimitPassed as error:
                raise BatchLimit(str(error)) from None
        self.runner.look()
        return json_response(record.shown(is_cancelled=False))

    @asynccontextmanager
    async def _admitted(self, request: BaseRequest) -> AsyncIterator[_Desk]:
        """Admit a call before it reads records, and yield what its tenant has.

        Limits per minute do not apply: the tenant's own batch may use them up, and its state must stay visible. Instead
        a caller makes few such calls at once.
        """
        calls, desk = self._calls, self._desk(request)
        call = http_call(request, default_timeout_seconds=calls.bounds.default_timeout_seconds)
        ledger = calls.groups.default.parts.ledger
        with self._turns.call(desk.caller.client):
            async with calls.bounds.admitted_to_read(call, ledger, is_limited=False):
                yield desk

    def _desk(self, request: BaseRequest) -> _Desk:
        """Return the desk of a caller. Raises InvalidRequest or Forbidden."""
        caller = self._calls.bounds.caller(http_call(request, default_timeout_seconds=1.0))
        return _Desk(self._store.of(caller.tenant), caller, self._turns)


async def _found_file(desk: _Desk, request: BaseRequest) -> FileRecord:
    record = await desk.run(desk.store.file, _id_in(request))
    if record is None:
        raise NoSuchFile("no such file")
    return record


async def _found_batch(desk: _Desk, request: BaseRequest) -> BatchRecord:
    record = await desk.run(desk.store.batch, _id_in(request))
    if record is None:
        raise NoSuchBatch("no such batch")
    return record


async def _shown(desk: _Desk, record: BatchRecord) -> Response:
    is_cancelled = await desk.run(desk.store.is_cancelled, record.id)
    return json_response(record.shown(is_cancelled=is_cancelled))


def _owner(caller: Caller) -> Owner:
    principal = PRINCIPAL.get()
    if principal is None:
        return Owner(tenant=caller.tenant)
    return Owner(
        tenant=caller.tenant,
        token_name=principal.name,
        role=principal.role,
        requests_per_minute=principal.limit.requests_per_minute,
        tokens_per_minute=principal.limit.tokens_per_minute,
    )


def _opened(path: Path) -> BinaryIO:
    return path.open("rb")


def _piece(file: BinaryIO) -> bytes:
    return file.read(CONTENT_BYTES)


def _shown_batches(store: TenantStore, query: Query) -> list[dict[str, Any]]:
    return [record.shown(is_cancelled=store.is_cancelled(record.id)) for record in store.batches(query)]


def _id_in(request: BaseRequest) -> str:
    """Return the third part of the path, which may be any text."""
    return request.path.split("/")[3]


def _query(request: BaseRequest, path: str) -> tuple[Query, int]:
    """Return what a call asks of a list, with one object more than its page may have, and the limit of the page.

    Raises InvalidRequest.
    """
    asked = request.query
    limit = asked.get("limit", str(DEFAULT_LIMITS[path]))
    if not (LIMIT.fullmatch(limit) and 1 <= int(limit) <= MAX_PAGE):
        raise InvalidRequest.of("limit", f"must be from 1 to {MAX_PAGE}")
    order = asked.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest.of("order", "must be asc or desc")
    after = asked.get("after")
    if after is not None and not is_id_here(after):
        raise InvalidRequest.of("after", "must be the id of a file or a batch")
    query = Query(
        limit=int(limit) + 1, after=after, newest_first=order == "desc", purpose=asked.get("purpose")
    )
    return query, int(limit)


def _page(shown: Sequence[dict[str, Any]], limit: int) -> Response:
    return json_response(page_document(shown, limit))
