"""Intake: bounds the number, size and time of requests that clients are still sending.

The ledger (admission/ledger.py) charges complete requests alone. Incomplete ones are charged here, to one budget of
bytes for all protocols of a router. One client may hold at most half of it. An ordinary request is small, arrives
at once and is never charged, so a full budget refuses only large or slow requests. Does not own how bytes are read
(services/interceptor.py, openai/http/body.py).
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NoReturn, TypeVar

from blockyard.router.calls.bounds import caller_client
from blockyard.router.errors import DeadlinePassed, Overloaded

MESSAGE_SECONDS = 10.0
"""Deadline for a message over gRPC to arrive completely."""
PROMPT_SECONDS = 0.25
"""A message that takes longer is charged at the largest size: gRPC does not report how much of it has arrived."""
MAX_INCOMPLETE = 4096
"""The most incomplete messages at once. A message counts until the event loop has read it."""
BUDGET_BYTES = 256 * 2**20
RETRY_SECONDS = 2.0
T = TypeVar("T")


class Charge:
    """Bytes of the budget that one incomplete request holds."""

    def __init__(self, intake: "Intake", client: str) -> None:
        self._intake, self._client = intake, client
        self.num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Take more bytes of the budget. Raises Overloaded."""
        self._intake.take(self._client, num_bytes)
        self.num_bytes += num_bytes


class Intake:
    """Bounds the incomplete requests of one router, over all its protocols."""

    def __init__(self, *, budget_bytes: int = BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self.held_bytes = 0
        self._held_by: Counter[str] = Counter()
        self.num_incomplete = 0
        """Number of incomplete messages, charged or not."""

    @contextmanager
    def charge(self, peer: str) -> Iterator[Charge]:
        """Yield a charge of 0 bytes, which may grow. The end of the context gives its bytes back.

        `peer` is the other end of the connection, as gRPC writes it.
        """
        client = caller_client(peer)
        charge = Charge(self, client)
        try:
            yield charge
        finally:
            self.held_bytes -= charge.num_bytes
            self._held_by[client] -= charge.num_bytes
            if not self._held_by[client]:
                del self._held_by[client]

    def take(self, client: str, num_bytes: int) -> None:
        """Take bytes of the budget for a client. Raises Overloaded."""
        if self.held_bytes + num_bytes > self._budget_bytes:
            self._refuse("too many large requests are being received")
        if self._held_by[client] + num_bytes > self._budget_bytes // 2:
            self._refuse("too many large requests of this client are being received")
        self.held_bytes += num_bytes
        self._held_by[client] += num_bytes

    async def message(
        self, reading: Callable[[], Awaitable[T]], *, most_bytes: int, peer: Callable[[], str]
    ) -> T:
        """Read one message by `reading` and return it. If it is late, charge `most_bytes` to the client of `peer`.

        Raises Overloaded, or DeadlinePassed if the message is not complete within MESSAGE_SECONDS.
        """
        if self.num_incomplete >= MAX_INCOMPLETE:
            self._refuse("too many requests are being received")
        loop = asyncio.get_running_loop()
        refusal: list[Overloaded] = []

        def charge_late() -> None:
            try:
                stack.enter_context(self.charge(peer())).grow(most_bytes)
                limit.reschedule(loop.time() + MESSAGE_SECONDS - PROMPT_SECONDS)
            except Overloaded as error:
                refusal.append(error)
                limit.reschedule(loop.time())

        self.num_incomplete += 1
        timer = loop.call_later(PROMPT_SECONDS, charge_late)
        with ExitStack() as stack:
            try:
                async with asyncio.timeout(None) as limit:
                    return await reading()
            except TimeoutError:
                if refusal:
                    raise refusal[0] from None
                raise DeadlinePassed(f"the message was not complete within {MESSAGE_SECONDS:g} s") from None
            finally:
                timer.cancel()
                self.num_incomplete -= 1

    @staticmethod
    def _refuse(reason: str) -> NoReturn:
        raise Overloaded(f"{reason}: come back in {RETRY_SECONDS:g} s", retry_after_seconds=RETRY_SECONDS)
