"""What stands before and behind every handler, whatever protocol the call came by: who calls, what a failure is
answered with, and how a cancelled call ends.

Owns the audit of refusals and the log line of an internal failure. Does not own the rules (admission/auth.py) nor how
an answer travels (services/interceptor.py, openai/routes.py).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from traceback import clear_frames

from blockyard.proto.runtime.logs import REQUEST_ID
from blockyard.router.admission.auth import METHOD_ROLES, PRINCIPAL, TokenTable, authenticate, check_role
from blockyard.router.admission.turn_share import TurnShare
from blockyard.router.errors import (
    DeadlinePassed,
    Forbidden,
    InternalError,
    RouterError,
    Unauthenticated,
    WorkerLost,
    as_router_error,
)

logger = logging.getLogger(__name__)
audit = logging.getLogger("blockyard.audit")

ENDS_A_TURN = 8
"""Cancelled calls whose frames are freed in one turn of the event loop."""
FAULTS = (InternalError, WorkerLost, DeadlinePassed)
"""Whose requests are told in the log: they had been taken in, and nobody wanted them to fail."""
UNKNOWN_LOG_SECONDS = 10.0
"""Calls without a known token are counted, and told so often at most: whoever makes them must not fill the log."""


class CallGate:
    """One for each router, shared by its protocols."""

    def __init__(self, tokens: Callable[[], TokenTable] | None) -> None:
        """`tokens`: those of now; None where clients are not authenticated."""
        self._tokens = tokens
        self._num_unknown = 0
        self._told_at = -UNKNOWN_LOG_SECONDS
        self._ends = TurnShare(ENDS_A_TURN)

    def admit(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """From now on the caller is PRINCIPAL. Raises Unauthenticated, Forbidden."""
        PRINCIPAL.set(None)
        REQUEST_ID.set("")
        if self._tokens is None:
            return
        try:
            principal = authenticate(method, metadata, self._tokens())
        except Unauthenticated:
            self._count_unknown()
            raise
        if principal is not None:
            try:
                check_role(method, principal)
            except Forbidden:
                # A method's name is the client's text, unless it is one of ours.
                told = method if method in METHOD_ROLES else "an unknown method"
                audit.warning("denied: %s as %s called %s", principal.name, principal.role, told)
                raise
        PRINCIPAL.set(principal)

    async def free(self, error: asyncio.CancelledError) -> None:
        """Of a call that was cancelled. A task group's frame and the error that ended it hold one another: freed here,
        a few calls a turn, it costs little; left to the garbage collector, many that end in one moment stop the loop.
        """
        await self._ends.take()
        clear_frames(error.__traceback__)

    def _count_unknown(self) -> None:
        self._num_unknown += 1
        now = time.monotonic()
        if now - self._told_at >= UNKNOWN_LOG_SECONDS:
            audit.warning("%d calls came without a token that is known", self._num_unknown)
            self._num_unknown, self._told_at = 0, now


def answer_to(error: Exception, method: str) -> RouterError:
    """What the client is told; what went wrong in here is logged."""
    answer = as_router_error(error)
    if request_id := REQUEST_ID.get():
        # The name by which an operator finds the lines about it, also where the router drew it.
        answer.metadata["request_id"] = request_id
        level = logging.INFO if isinstance(answer, FAULTS) else logging.DEBUG
        logger.log(level, "%s ended: %s", method, answer.reason)
    if type(answer) is InternalError:
        # The exception's text may quote the request: log where it was raised, not what it says.
        logger.error("%s failed: %s at %s", method, type(error).__name__, _origin(error))
    return answer


def _origin(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "unknown place"
    code = trace.tb_frame.f_code
    return (
        f"{code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno} in {code.co_name} ({type(error).__name__})"
    )
