"""Call gate: authenticates a call, turns its failure into an answer, and frees a cancelled call, for all protocols.

Owns the audit of refusals and the log line of an internal failure. Does not own the rules (admission/auth.py) or how an
answer is sent (services/interceptor.py, openai/routes.py).
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from traceback import clear_frames

from blockyard.proto.runtime.logs import REQUEST_ID
from blockyard.router.admission.auth import METHOD_ROLES, PRINCIPAL, TokenTable, authenticate, check_role
from blockyard.router.admission.loop_budget import LoopBudget
from blockyard.router.errors import (
    AuthUnavailable,
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

ENDS_PER_TICK = 4
"""Cancelled calls whose frames are freed in one tick of the event loop."""
FAULTS = (InternalError, WorkerLost, DeadlinePassed)
"""Errors that are logged at INFO, because an admitted request failed by no act of its client. Others: at DEBUG."""
REPAIR_SECONDS = 5.0
"""Delay after which a client may try again while the auth file is bad."""
UNKNOWN_LOG_SECONDS = 10.0
"""Least time between two log lines about unknown tokens. It keeps a hostile client from filling the log."""


class CallGate:
    """Gate of one router, shared by its protocols."""

    def __init__(
        self,
        tokens: Callable[[], TokenTable] | None,
        suspended: Callable[[], TokenTable | None] = lambda: None,
    ) -> None:
        """`tokens` returns the table that is valid now. None where clients are not authenticated.

        `suspended` returns the tokens that are not valid only because the auth file cannot be used.
        """
        self._tokens, self._suspended = tokens, suspended
        self.refused = Counter[str]()
        """Refused calls, by the reason of their error."""
        self._num_unknown = 0
        self._logged_at = -UNKNOWN_LOG_SECONDS
        self._ends = LoopBudget(ENDS_PER_TICK)

    def admit(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Authenticate the caller, check that its role may call the method, and set PRINCIPAL.

        Raises Unauthenticated, Forbidden or AuthUnavailable.
        """
        try:
            self._admit(method, tuple(metadata))
        except RouterError as error:
            self.refused[error.reason] += 1
            raise

    def _admit(self, method: str, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        PRINCIPAL.set(None)
        REQUEST_ID.set("")
        if self._tokens is None:
            return
        try:
            principal = authenticate(method, metadata, self._tokens())
        except Unauthenticated:
            self._check_suspended(method, metadata)
            self._count_unknown()
            raise
        if principal is not None:
            try:
                check_role(method, principal)
            except Forbidden:
                # A method's name is the client's text, unless it is one of ours.
                shown = method if method in METHOD_ROLES else "an unknown method"
                audit.warning("denied: %s as %s called %s", principal.name, principal.role, shown)
                raise
        PRINCIPAL.set(principal)

    def _check_suspended(self, method: str, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        """Raise AuthUnavailable for a token that only the state of the auth file makes invalid."""
        suspended = self._suspended()
        if suspended is not None:
            with suppress(Unauthenticated):
                authenticate(method, metadata, suspended)
                raise AuthUnavailable("the auth file cannot be read", retry_after_seconds=REPAIR_SECONDS)

    async def free(self, error: asyncio.CancelledError) -> None:
        """Free the frames of a cancelled call, a few calls per tick of the event loop.

        The frame of a task group and the error that ended it refer to each other, so only the garbage collector would
        free them. It would free many at once and block the loop.
        """
        await self._ends.take()
        clear_frames(error.__traceback__)

    def _count_unknown(self) -> None:
        self._num_unknown += 1
        now = time.monotonic()
        if now - self._logged_at >= UNKNOWN_LOG_SECONDS:
            audit.warning("%d calls came without a known token", self._num_unknown)
            self._num_unknown, self._logged_at = 0, now


def answer_to(error: Exception, method: str) -> RouterError:
    """Return the error to send to the client, with the request's id, and log how the request ended."""
    answer = as_router_error(error)
    if request_id := REQUEST_ID.get():
        # Operators find the log lines of the request by this id, also where the router drew it.
        answer.metadata["request_id"] = request_id
        level = logging.INFO if isinstance(answer, FAULTS) else logging.DEBUG
        logger.log(level, "%s ended: %s", method, answer.reason)
    if type(answer) is InternalError:
        # The exception's text may quote the request. Log where it was raised instead.
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
