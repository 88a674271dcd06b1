"""Handlers of /v1/files and /v1/batches, over the folder of batches.

A caller finds only what its tenant has. Does not own the running of batches (runner.py), permissions or errors' way
out (../routes.py).
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO

from aiohttp.web import BaseRequest, Response, StreamResponse
from blockyard.router.admission.auth import PRINCIPAL
from blockyard.router.calls.bounds import Caller
from blockyard.router.calls.generating import Calls
from blockyard.router.calls.intake import Intake
from blockyard.router.errors import Forbidden, InvalidRequest
from blockyard.router.openai.batches.fields import CREATE_FIELDS, checked_metadata
from blockyard.router.openai.batches.line_calls import LineCalls
from blockyard.router.openai.batches.paths import BATCHES, FILES
from blockyard.router.openai.batches.records import BatchRecord, FileRecord, Owner, page
from blockyard.router.openai.batches.runner import Runner
from blockyard.router.openai.batches.store import (
    LimitPassed,
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

WINDOW = "24h"
WINDOW_SECONDS = 24 * 3600
DEFAULT_LIMITS = {FILES: 1000, BATCHES: 20}
MAX_PAGE = 1000
LIMIT = re.compile(r"[0-9]{1,4}")
CONTENT_BYTES = 256 * 1024

Headed = Callable[[StreamResponse, BaseRequest, CallNotes], None]


class BatchRoutes:
    """Files and batches of one gateway."""

    def __init__(self, folder: Path, calls: Calls, line_calls: LineCalls, intake: Intake) -> None:
        self._store = Store(folder)
        self._calls, self._intake, self._endpoints = calls, intake, line_calls.endpoints
        self._uploads = Uploads()
        self.runner = Runner(self._store, calls, line_calls)

    # Files

    async def files(self, request: BaseRequest, notes: CallNotes) -> StreamResponse:
        if request.method == "POST":
            return await self._upload(request)
        async with self._admitted(request) as store:
            shown = [record.shown() for record in await asyncio.to_thread(store.files)]
        purpose = request.query.get("purpose")
        return _listed([one for one in shown if purpose in (None, one["purpose"])], request, FILES)

    async def file(self, request: BaseRequest, notes: CallNotes) -> StreamResponse:
        store, record = await self._found_file(request)
        if request.method == "GET":
            return json_response(record.shown())
        used = await asyncio.to_thread(store.batches)
        if any(record.id == batch.input_file_id and not batch.has_ended for batch in used):
            raise Conflict("a batch that has not ended reads this file")
        await asyncio.to_thread(store.remove_file, record.id)
        return json_response({"id": record.id, "object": "file", "deleted": True})

    async def content(self, request: BaseRequest, notes: CallNotes, headed: Headed) -> StreamResponse:
        """Stream the lines of a file. Cut off a client that does not read."""
        store, record = await self._found_file(request)
        response = StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        response.content_length = record.num_bytes
        headed(response, request, notes)
        with await asyncio.to_thread(store.path(record.id).open, "rb") as file:
            try:
                await self._read_by_client(response.prepare(request))
                while piece := await asyncio.to_thread(file.read, CONTENT_BYTES):
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
        store, _ = self._tenant(request)
        file_id = drawn_file_id()
        async with self._uploads.turn():
            upload = store.upload(file_id)
            try:
                target = await asyncio.to_thread(upload.__enter__)
            except LimitPassed as error:
                raise BatchLimit(str(error)) from None
            try:
                filename, num_bytes = await receive(request, target)
            except BaseException as error:
                upload.__exit__(type(error), error, error.__traceback__)
                raise
            record = FileRecord(
                id=file_id,
                filename=filename,
                purpose="batch",
                num_bytes=num_bytes,
                created_at=int(time.time()),
            )
            await asyncio.to_thread(_keep, upload, store, record)
        return json_response(record.shown())

    async def _found_file(self, request: BaseRequest) -> tuple[TenantStore, FileRecord]:
        async with self._admitted(request) as store:
            record = await asyncio.to_thread(store.file, _id_in(request))
        if record is None:
            raise NoSuchFile("no such file")
        return store, record

    # Batches

    async def batches(self, request: BaseRequest, notes: CallNotes) -> StreamResponse:
        if request.method == "POST":
            return await self._create(request)
        async with self._admitted(request) as store:
            shown = await asyncio.to_thread(_shown_batches, store)
        return _listed(shown, request, BATCHES)

    async def batch(self, request: BaseRequest, notes: CallNotes) -> StreamResponse:
        async with self._admitted(request) as store:
            return await self._shown(store, await self._found_batch(store, request))

    async def cancel(self, request: BaseRequest, notes: CallNotes) -> StreamResponse:
        # Not admitted first: a router that is full should hear of work that is not wanted any more.
        store, _ = self._tenant(request)
        record = await self._found_batch(store, request)
        if record.has_ended:
            raise Conflict(f"the batch has ended: it is {record.status}")
        await asyncio.to_thread(store.cancel, record.id)
        self.runner.look()
        return await self._shown(store, record)

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
        store, caller = self._tenant(request)
        async with self._admitted(request):
            source = await asyncio.to_thread(store.file, input_file_id)
        if source is None or source.purpose != "batch":
            raise InvalidRequest.of("input_file_id", "must be a file with the purpose batch")
        now = int(time.time())
        record = BatchRecord(
            id=drawn_batch_id(),
            owner=_owner(caller),
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
            await asyncio.to_thread(store.create, record)
        except LimitPassed as error:
            raise BatchLimit(str(error)) from None
        self.runner.look()
        return json_response(record.shown(is_cancelled=False))

    async def _found_batch(self, store: TenantStore, request: BaseRequest) -> BatchRecord:
        record = await asyncio.to_thread(store.batch, _id_in(request))
        if record is None:
            raise NoSuchBatch("no such batch")
        return record

    async def _shown(self, store: TenantStore, record: BatchRecord) -> Response:
        is_cancelled = await asyncio.to_thread(store.is_cancelled, record.id)
        return json_response(record.shown(is_cancelled=is_cancelled))

    @asynccontextmanager
    async def _admitted(self, request: BaseRequest) -> AsyncIterator[TenantStore]:
        """Admit a call before it reads records, and yield what its tenant has.

        Limits per minute do not apply: the tenant's own batch may use them up, and its state must stay visible.
        """
        calls = self._calls
        call = http_call(request, default_timeout_seconds=calls.bounds.default_timeout_seconds)
        ledger = calls.groups.default.parts.ledger
        async with calls.bounds.admitted_to_read(call, ledger, is_limited=False) as tenant:
            yield self._store.of(tenant)

    def _tenant(self, request: BaseRequest) -> tuple[TenantStore, Caller]:
        """Return what the caller's tenant has. Raises InvalidRequest or Forbidden."""
        caller = self._calls.bounds.caller(http_call(request, default_timeout_seconds=1.0))
        return self._store.of(caller.tenant), caller


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


def _keep(upload: AbstractContextManager[BinaryIO], store: TenantStore, record: FileRecord) -> None:
    """End an upload. A client that goes meanwhile ends only the waiting for this thread.

    So no file stays without a record, which nobody could see or delete.
    """
    upload.__exit__(None, None, None)
    store.add_file(record)


def _shown_batches(store: TenantStore) -> list[dict[str, Any]]:
    return [record.shown(is_cancelled=store.is_cancelled(record.id)) for record in store.batches()]


def _id_in(request: BaseRequest) -> str:
    """Return the third part of the path, which may be any text."""
    return request.path.split("/")[3]


def _listed(shown: list[dict[str, Any]], request: BaseRequest, path: str) -> Response:
    query = request.query
    limit = query.get("limit", str(DEFAULT_LIMITS[path]))
    if not (LIMIT.fullmatch(limit) and 1 <= int(limit) <= MAX_PAGE):
        raise InvalidRequest.of("limit", f"must be from 1 to {MAX_PAGE}")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest.of("order", "must be asc or desc")
    after = query.get("after")
    if after is not None and not is_id_here(after):
        raise InvalidRequest.of("after", "must be the id of a file or a batch")
    listed = page(shown, after=after, limit=int(limit), newest_first=order == "desc")
    return json_response(listed.document())
