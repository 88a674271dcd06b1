"""Request registry: the requests that this router holds now, by id, with their progress and a way to abort them.

Owns uniqueness of ids within a realm (calls/bounds.py), so that no tenant learns another's ids. Owns draining too. Does
not own the work of a request (generation.py).
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

from blockyard.router.errors import DuplicateRequest, RequestAborted, RouterDraining, UnknownRequest
from blockyard.router.generation.attempt import Progress

RETRY_AFTER_SECONDS = 0.5


class RequestState(Enum):
    QUEUED = auto()
    """The request has no token yet, and no worker has it."""
    PLACED = auto()
    STREAMING = auto()


@dataclass(slots=True, kw_only=True, eq=False)
class RequestRecord:
    request_id: str
    arrival: float
    """Time of arrival on the registry's clock."""
    task: asyncio.Task[object]
    tenant: str = ""
    realm: str = ""
    client: str = ""
    """Key of the client's queue among waiting requests (calls/bounds.py)."""
    model: str = ""
    """Id of the request's model."""
    prompt_tokens: int = 0
    """Number of prompt tokens. 0 until the prompt is tokenized."""
    progress: Progress = field(default_factory=Progress)
    is_aborted: bool = False

    @property
    def state(self) -> RequestState:
        if self.progress.num_generated:
            return RequestState.STREAMING
        return RequestState.PLACED if self.progress.is_placed else RequestState.QUEUED


class RequestRegistry:
    """Registry of the requests that one router holds, waiting or running."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[tuple[str, str], RequestRecord] = {}
        """Records by realm and id."""
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False

    def records(self) -> list[RequestRecord]:
        return list(self._records.values())

    @contextmanager
    def hold(
        self, request_id: str, *, tenant: str = "", realm: str = "", client: str = "", model: str = ""
    ) -> Iterator[RequestRecord]:
        """Register the request that the calling task runs, for the life of the context, and yield its record.

        Raises DuplicateRequest if the realm has a request of this id, RouterDraining, and RequestAborted if `abort`
        ended the request.
        """
        if self.is_draining:
            raise RouterDraining("this router is shutting down", retry_after_seconds=RETRY_AFTER_SECONDS)
        key = realm, request_id
        if key in self._records:
            raise DuplicateRequest.of("request_id", "a request of this id is running")
        task = asyncio.current_task()
        assert task is not None
        record = RequestRecord(
            request_id=request_id,
            arrival=self._clock(),
            task=task,
            tenant=tenant,
            realm=realm,
            client=client,
            model=model,
        )
        self._records[key] = record
        self._idle.clear()
        try:
            yield record
        except asyncio.CancelledError:
            # As in asyncio.timeout, our own cancellation becomes an error. Any other cancellation continues.
            if record.is_aborted and task.uncancel() == 0:
                raise RequestAborted("the request was aborted") from None
            raise
        finally:
            del self._records[key]
            if not self._records:
                self._idle.set()

    def abort(self, request_id: str, *, realm: str | None = None) -> None:
        """Cancel the task of the request with this id in this realm, or in every realm if `realm` is None.

        Raises UnknownRequest, also if only another realm has such a request.
        """
        records = [
            record
            for record in self._records.values()
            if record.request_id == request_id and realm in (None, record.realm)
        ]
        if not records:
            raise UnknownRequest.of("request_id", "no request of this id is running here")
        for record in records:
            if not record.is_aborted:
                record.is_aborted = True
                record.task.cancel()

    def num_held(self, model: str | None = None) -> int:
        """Return the number of requests, of all models or of one."""
        return sum(model in (None, record.model) for record in self._records.values())

    def num_waiting(self, model: str | None = None) -> int:
        """Return the number of requests without a token that no worker has, of all models or of one."""
        return sum(
            record.state is RequestState.QUEUED and model in (None, record.model)
            for record in self._records.values()
        )

    def num_unstarted(self) -> int:
        """Return the number of requests without a token, with or without a worker."""
        return sum(record.state is not RequestState.STREAMING for record in self._records.values())

    async def until_idle(self) -> None:
        await self._idle.wait()
