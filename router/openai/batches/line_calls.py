"""Line calls: a line of a batch as a call, by the same rules as one over HTTP.

A call that is refused for lack of room or workers is tried again until the batch expires. Each other refusal is the
line's answer. Does not own files (answer_file.py) or which line runs when (runner.py).
"""

import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from blockyard.proto.limits import MAX_PRIORITY
from blockyard.proto.naming.headers import TENANT
from blockyard.router.admission.auth import PRINCIPAL, Principal, Role
from blockyard.router.admission.rate_limits import RateLimit
from blockyard.router.calls.gate import answer_to
from blockyard.router.errors import RouterError, Unsupported
from blockyard.router.openai.answers.face import Asked
from blockyard.router.openai.batches.lines import Line, answer_line
from blockyard.router.openai.batches.records import BatchRecord, Owner
from blockyard.router.openai.http.call import HttpCall, drawn_id
from blockyard.router.openai.http.errors import NO_NAMES, WORTH_RETRYING, HttpRefusal, error_body, status_of
from blockyard.router.openai.requests.fields import Body
from blockyard.router.services.grpc_status import code_of

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
LATER_SECONDS = 60.0
Whole = Callable[[Asked, HttpCall, str], Awaitable[dict[str, Any]]]
"""Runs a call with this request id and returns its answer. Raises RouterErrors, also in groups."""
ADDRESS = "unix:batch"
"""Stands for the address of a client without a tenant: all their batches share one account."""


@dataclass(slots=True, kw_only=True)
class LineCall:
    """One line, with the call that its body asks for, or with the refusal of its body."""

    custom_id: str
    asked: Asked | RouterError
    record: BatchRecord
    whole: Whole
    _pause_seconds: float = FIRST_PAUSE_SECONDS

    @property
    def num_sequences(self) -> int:
        if isinstance(self.asked, RouterError):
            return 1
        wanted = self.asked.wanted
        return wanted.sequences_a_prompt * len(wanted.requests)

    async def attempt(self) -> tuple[bool, bytes] | float:
        """Return whether the request succeeded, and the line of its answer, or the seconds until the next attempt.

        The task that calls it must make no other call.
        """
        PRINCIPAL.set(_principal(self.record.owner))
        request_id = drawn_id()
        try:
            if isinstance(self.asked, RouterError):
                raise self.asked
            body = await self.whole(self.asked, self._call(), request_id)
            return True, answer_line(self.custom_id, status=200, request_id=request_id, body=body)
        except Exception as error:
            refusal = answer_to(error, "a line of a batch")
        if not isinstance(refusal, HttpRefusal) and code_of(refusal) in WORTH_RETRYING:
            pause, self._pause_seconds = (
                self._pause_seconds,
                min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS),
            )
            return max(pause * (0.5 + random.random()), refusal.retry_after_seconds or 0.0)
        names = NO_NAMES if isinstance(self.asked, RouterError) else self.asked.wanted.names
        status, body = status_of(refusal), error_body(refusal, names)
        return False, answer_line(self.custom_id, status=status, request_id=request_id, body=body)

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

    def __init__(self, whole: Whole, asks: Mapping[str, Callable[[Body], Asked]]) -> None:
        """`whole` runs a call. `asks` has what turns a body into a call, by the endpoint of the batch."""
        self._whole_answer, self._asks = whole, asks

    def call(self, line: Line, record: BatchRecord) -> LineCall:
        return LineCall(
            custom_id=line.custom_id,
            asked=self._asked(line, record.endpoint),
            record=record,
            whole=self._whole_answer,
        )

    def _asked(self, line: Line, endpoint: str) -> Asked | RouterError:
        try:
            asked = self._asks[endpoint](line.body)
        except RouterError as error:
            return error
        if asked.wanted.answering.streams:
            return Unsupported.of("stream", "a batch does not stream")
        for request in asked.wanted.requests:
            request.priority = MAX_PRIORITY
        return asked


def _principal(owner: Owner) -> Principal | None:
    if owner.token_name is None:
        return None
    limit = RateLimit(
        requests_per_minute=owner.requests_per_minute, tokens_per_minute=owner.tokens_per_minute
    )
    return Principal(name=owner.token_name, role=Role(owner.role), tenant=owner.tenant, limit=limit)
