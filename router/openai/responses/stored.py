"""Stored responses: keeps responses with all their items for some time, so that a later request may go on from one.

A record has the whole context of its response. So one read is enough, and no record needs another one. Owns what is
in a record, and the routes that read and delete one. Does not own Redis (../../sealed_records.py).
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aiohttp.web import BaseRequest, Response
from blockyard.router.calls.generating import Calls
from blockyard.router.errors import InvalidRequest, UnknownResponse, Unsupported
from blockyard.router.openai.answers.face import Asked
from blockyard.router.openai.http.call import CallNotes, HttpCall, http_call
from blockyard.router.openai.http.json_response import encoded, json_response
from blockyard.router.openai.requests.fields import Body
from blockyard.router.openai.responses.face import Keep, ResponseFace, keep_nothing
from blockyard.router.openai.responses.items import (
    Item,
    Surroundings,
    is_response_id,
    new_response_id,
    references,
    response_of,
)
from blockyard.router.openai.responses.output import OutputForm
from blockyard.router.openai.responses.request import ResponseRequest, read_request
from blockyard.router.sealed_records import RecordName, SealedRecords

KIND = "response"
DEFAULT_PAGE = 20
MAX_PAGE = 100
PAGE_QUERY: Mapping[str, Mapping[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": DEFAULT_PAGE},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
}
"""Parameters of a page, as JSON schemas."""
MAX_REFERRED = 32
"""Stored responses that are read for the references of one input. One has the whole conversation before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A record: a response, and the items before its output."""

    response: Mapping[str, Any]
    context: Sequence[Item]

    @property
    def items(self) -> list[Item]:
        """Return all items that a next request goes on from."""
        return [*self.context, *self.response["output"]]

    def encoded(self) -> bytes:
        return encoded({"response": self.response, "context": self.context})

    @classmethod
    def decoded(cls, record: bytes) -> "StoredResponse":
        return cls(**json.loads(record))


class Responses:
    """Calls of /v1/responses and the routes of stored responses, of one gateway."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        parts = calls.groups.default.parts
        self._records: SealedRecords | None = parts.records
        self._seal_of = parts.reasoning_seal

    async def asked(self, body: Body, call: HttpCall) -> Asked:
        """Check the body of a call that generates. Raises RouterErrors."""
        request = read_request(body)
        tenant = self._tenant(call)
        seal = None if self._seal_of is None else self._seal_of(tenant)
        around = await self._around(request, call)
        if seal is not None:
            around = replace(around, opened=seal.opened)
        context = [*around.earlier, *request.items(around)]
        stores = self._records is not None and request.asks_to_store is not False
        answers = self._calls.groups.of(body.get("model")).parts.answers
        wanted = request.wanted(
            context, answers, can_store=self._records is not None, can_seal=seal is not None
        )
        form = OutputForm(
            response_id=around.response_id,
            num_before=len(context),
            has_summaries=request.asks_for_summary,
            sealed=seal.sealed if seal is not None and request.asks_for_encrypted else None,
        )
        # The answer of a prefetch is empty, so no later call could go on from it.
        keeps = stores and not wanted.requests[0].prefetch
        keep: Keep = partial(self._keep, context, tenant) if keeps else keep_nothing
        return Asked(wanted, partial(ResponseFace, wanted, request.echo(), form, keep))

    async def _around(self, request: ResponseRequest, call: HttpCall) -> Surroundings:
        """Return the stored items that a request refers to. A call that would be refused now reads nothing.

        The whole prompt is charged later, once its size is known. Raises RouterErrors.
        """
        around = Surroundings(response_id=new_response_id())
        referred = references("input", request.body.get("input"))
        if request.previous_id is None and not referred:
            return around
        ledger = self._calls.groups.of(request.body.get("model")).parts.ledger
        async with self._calls.bounds.admitted_to_read(call, ledger) as tenant:
            if request.previous_id is not None:
                previous = await self._stored("previous_response_id", request.previous_id, tenant)
                around = replace(around, earlier=previous.items)
                for item in around.earlier:
                    referred.pop(item["id"], None)
            return replace(around, stored=await self._referred(referred, tenant))

    async def _referred(self, paths: Mapping[str, str], tenant: str) -> dict[str, Item]:
        """Return those of the referred items that are stored, by id.

        Clients refer to a conversation's items in its order. So the last one's response is read first: its record has
        all the earlier items too.

        Raises InvalidRequest, Unsupported or StoreUnavailable.
        """
        for path in paths.values():
            self._store(path)
        found: dict[str, Item] = {}
        read: set[str] = set()
        for referred, path in reversed(list(paths.items())):
            response_id = response_of(referred)
            if referred in found or response_id is None or response_id in read:
                continue
            if len(read) == MAX_REFERRED:
                raise InvalidRequest.of(
                    path, f"the items of an input are in at most {MAX_REFERRED} stored responses"
                )
            read.add(response_id)
            record = await self._record(path, response_id, tenant)
            for item in () if record is None else record.items:
                if item["id"] in paths:
                    found.setdefault(item["id"], item)
        return found

    async def get(self, request: BaseRequest, notes: CallNotes) -> Response:
        if request.query.get("stream", "false") != "false":
            raise Unsupported.of("stream", "is not supported: the events of a stored response are not kept")
        return json_response((await self._asked_for(request)).response)

    async def delete(self, request: BaseRequest, notes: CallNotes) -> Response:
        response_id = _id_in(request.path)
        async with self._admitted(request) as tenant:
            await self._stored("response_id", response_id, tenant)
            if self._records is not None:
                await self._records.delete(_name(tenant, response_id))
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, request: BaseRequest, notes: CallNotes) -> Response:
        stored = await self._asked_for(request)
        return json_response(page_of(stored.context, request.query))

    async def _keep(self, context: Sequence[Item], tenant: str, response: Mapping[str, Any]) -> bool:
        if self._records is None:
            return False
        record = StoredResponse(response=response, context=context)
        return await self._records.put(_name(tenant, response["id"]), record.encoded())

    async def _asked_for(self, request: BaseRequest) -> StoredResponse:
        response_id = _id_in(request.path)
        async with self._admitted(request) as tenant:
            return await self._stored("response_id", response_id, tenant)

    @asynccontextmanager
    async def _admitted(self, request: BaseRequest) -> AsyncIterator[str]:
        """Charge a call that only reads or deletes, and yield its tenant."""
        bounds = self._calls.bounds
        call = http_call(request, default_timeout_seconds=bounds.default_timeout_seconds)
        async with bounds.admitted(call, 1, self._calls.groups.default.parts.ledger):
            yield self._tenant(call)

    def _tenant(self, call: HttpCall) -> str:
        return self._calls.bounds.caller(call).tenant

    async def _stored(self, field: str, response_id: str, tenant: str) -> StoredResponse:
        """Return the stored response of an id, which `field` of the call names.

        Raises Unsupported where nothing is stored, UnknownResponse or StoreUnavailable.
        """
        found = await self._record(field, response_id, tenant)
        if found is None:
            raise UnknownResponse.of(field, "no stored response has this id, or it has expired")
        return found

    async def _record(self, field: str, response_id: str, tenant: str) -> StoredResponse | None:
        """Return a stored response, or None if the tenant has none of this id. Raises Unsupported or
        StoreUnavailable."""
        store = self._store(field)
        record = await store.get(_name(tenant, response_id)) if is_response_id(response_id) else None
        return None if record is None else StoredResponse.decoded(record)

    def _store(self, field: str) -> SealedRecords:
        """Return the store, which `field` of the call needs. Raises Unsupported if there is none."""
        if self._records is None:
            raise Unsupported.of(
                field, "is not supported: this router stores no responses, for want of Redis"
            )
        return self._records


def page_of(context: Sequence[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of a list of items that the query asks for: the newest first, unless it says otherwise.

    Raises InvalidRequest.
    """
    written, order = query.get("limit", str(DEFAULT_PAGE)), query.get("order", "desc")
    limit = (
        int(written) if written.isascii() and written.isdigit() and len(written) <= len(str(MAX_PAGE)) else 0
    )
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest.of("limit", f"must be a number from 1 to {MAX_PAGE}")
    if order not in ("asc", "desc"):
        raise InvalidRequest.of("order", "must be asc or desc")
    listed = list(context) if order == "asc" else list(reversed(context))
    after = query.get("after")
    if after is not None:
        places = [number for number, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise InvalidRequest.of("after", "must be the id of an item of this response")
        listed = listed[places[0] + 1 :]
    page = listed[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(listed) > limit,
    }


def _id_in(path: str) -> str:
    """Return the id in /v1/responses/{id} and below it."""
    return path.split("/")[3]


def _name(tenant: str, response_id: str) -> RecordName:
    return RecordName(kind=KIND, tenant=tenant, record_id=response_id)
