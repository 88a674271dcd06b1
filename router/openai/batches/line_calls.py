"""Line calls: a line of a batch as a call, by the same rules as one over HTTP.

A call that is refused for lack of room or workers is tried again until the batch expires. Each other refusal is the
line's answer. Does not own files (answer_file.py) or which line runs when (runner.py).
"""

import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from blockyard.proto.naming.headers import TENANT
from blockyard.router.admission.auth import PRINCIPAL, Principal, Role
from blockyard.router.admission.rate_limits import RateLimit
from blockyard.router.calls.gate import answer_to
from blockyard.router.errors import RouterError
from blockyard.router.openai.batches.lines import Line, answer_line
from blockyard.router.openai.batches.records import BatchRecord, Owner
from blockyard.router.openai.http.call import CallNotes, HttpCall, drawn_id
from blockyard.router.openai.http.errors import WORTH_RETRYING, HttpRefusal, error_body, status_of
from blockyard.router.openai.http.json_response import encoded
from blockyard.router.openai.requests.fields import Body
from blockyard.router.services.grpc_status import code_of

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
LATER_SECONDS = 60.0
ADDRESS = "unix:batch"
"""Stands for the address of a client without a tenant: all their batches share one account."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one line."""

    run: Callable[[HttpCall, CallNotes], Awaitable[bytes]]
    """Runs the call and returns its answer as JSON. It may be called again. Raises RouterErrors, also in groups."""
    num_sequences: int = 1
    """Most sequences that the call runs at once."""


Prepare = Callable[[Body], Work]
"""Checks a line's body as far as that needs neither Redis nor a worker. Raises RouterErrors."""


@dataclass(slots=True, kw_only=True)
class LineCall:
    """One line, with the work that its body asks for, or with the refusal of its body."""

    custom_id: str
    work: Work | RouterError
    record: BatchRecord
    _pause_seconds: float = field(default=FIRST_PAUSE_SECONDS, init=False)

    @property
    def num_sequences(self) -> int:
        return 1 if isinstance(self.work, RouterError) else self.work.num_sequences

    async def attempt(self) -> tuple[bool, bytes] | float:
        """Return whether the request succeeded, and the line of its answer, or the seconds until the next attempt.

        The task that calls it must make no other call.
        """
        PRINCIPAL.set(_principal(self.record.owner))
        notes = CallNotes(request_id=drawn_id())
        try:
            if isinstance(self.work, RouterError):
                raise self.work
            body = await self.work.run(self._call(), notes)
            return True, answer_line(self.custom_id, status=200, request_id=notes.request_id, body=body)
        except Exception as error:
            refusal = answer_to(error, "a line of a batch")
        if not isinstance(refusal, HttpRefusal) and code_of(refusal) in WORTH_RETRYING:
            pause, self._pause_seconds = (
                self._pause_seconds,
                min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS),
            )
            return max(pause * (0.5 + random.random()), refusal.retry_after_seconds or 0.0)
        status, body = status_of(refusal), encoded(error_body(refusal, notes.names))
        return False, answer_line(self.custom_id, status=status, request_id=notes.request_id, body=body)

    def _call(self) -> HttpCall:
        tenant = self.record.owner.tenant
        seconds = self.record.expires_at - time.time()
        return HttpCall(
            metadata=((TENANT, tenant),) if tenant else (),
            # The batch expires first, with the code of an expired batch for its lines.
            deadline=time.monotonic() + max(seconds, 0.0) + LATER_SECONDS,
            address=ADDRESS,
        )


class LineCalls:
    """Makes the calls of lines for one gateway."""

    def __init__(self, prepares: Mapping[str, Prepare]) -> None:
        """`prepares` has what prepares a line, by the endpoint of its batch."""
        self._prepares = prepares

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Return the paths whose requests a batch may have."""
        return tuple(self._prepares)

    def call(self, line: Line, record: BatchRecord) -> LineCall:
        try:
            work: Work | RouterError = self._prepares[record.endpoint](line.body)
        except RouterError as error:
            work = error
        return LineCall(custom_id=line.custom_id, work=work, record=record)


def _principal(owner: Owner) -> Principal | None:
    if owner.token_name is None:
        return None
    limit = RateLimit(
        requests_per_minute=owner.requests_per_minute, tokens_per_minute=owner.tokens_per_minute
    )
    return Principal(name=owner.token_name, role=Role(owner.role), tenant=owner.tenant, limit=limit)
