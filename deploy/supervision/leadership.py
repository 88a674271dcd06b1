"""Leadership: which control plane of a cluster may act, as an epoch in Ray's key-value store.

A supervisor claims the next epoch when it starts, and the newest epoch leads. A supervisor whose host was cut off may
still run while Ray has started another one elsewhere. So each act needs a fresh answer of Ray's head that its epoch is
the newest. Without an answer the act is not done, and is forgotten.

An act may still travel while the link drops, and arrive minutes later. So the process that executes it asks Ray's head
again: a Claim travels with each call that ends, drains or starts something. Epochs of a cluster's name only rise, as
long as Ray lives: the newest is never deleted, by `down` neither.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import ray
from ray.exceptions import RayError

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""Age of an answer up to which it allows an act."""
RETRY_SECONDS = 1.0
NAMESPACE = b"blockyard-epochs"
InThread = Callable[..., Awaitable[Any]]


class NotLeadingError(RuntimeError):
    """This control plane may not act now."""


class SupersededError(NotLeadingError):
    """Another control plane has claimed a newer epoch. This one must end itself."""


class SilentHeadError(NotLeadingError):
    """Ray's head does not say in time which epoch is the newest."""

    def __init__(self, text: str = f"Ray's head does not answer within {ANSWER_SECONDS:.0f} s") -> None:
        super().__init__(text)


class Epochs(Protocol):
    """The epochs of one cluster that were claimed. Each call blocks, and raises SilentHeadError without an answer."""

    def numbers(self) -> list[int]: ...

    def add(self, number: int) -> bool:
        """Store an epoch if it is absent. Return False if it was there."""
        ...

    def remove(self, number: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Claim:
    """An epoch that one control plane has claimed. It can be sent to other processes."""

    epochs: Epochs
    number: int

    def check(self) -> None:
        """Ask Ray's head for the newest epoch.

        Raise SupersededError if that is another one, SilentHeadError if the answer is late.
        """
        asked_at = time.monotonic()
        newest = max(self.epochs.numbers(), default=0)
        if newest != self.number:
            raise SupersededError(f"epoch {newest} leads now, not {self.number}")
        if time.monotonic() - asked_at > ANSWER_SECONDS:
            raise SilentHeadError


class Leadership:
    """The claim of this process, and when Ray's head has confirmed it last."""

    def __init__(self, claim: Claim, *, in_thread: InThread, give_way: Callable[[], NoReturn]) -> None:
        """`in_thread` calls a function that waits for Ray. `give_way` ends this process."""
        self.claim = claim
        self._in_thread, self._give_way = in_thread, give_way
        self._confirmed_at = asyncio.get_running_loop().time()

    async def confirm(self) -> None:
        """Return if this process may act now, by a fresh answer of Ray's head. End it if another one leads.

        Raise SilentHeadError without such an answer.
        """
        asked_at = asyncio.get_running_loop().time()
        try:
            await self._in_thread(self.claim.check)
        except SupersededError as error:
            logger.warning("this supervisor ends itself: %s", error)
            self._give_way()
        if asyncio.get_running_loop().time() - asked_at > ANSWER_SECONDS:
            raise SilentHeadError
        self._confirmed_at = asked_at

    async def keep_confirmed(self) -> None:
        """Confirm the claim again and again, until cancelled, so that a newer one ends this process soon."""
        while True:
            await self.until_confirmed()
            await asyncio.sleep(RETRY_SECONDS)

    async def until_confirmed(self) -> None:
        """Wait until this process may act."""
        while True:
            try:
                return await self.confirm()
            except SilentHeadError:
                await asyncio.sleep(RETRY_SECONDS)

    @property
    def is_recent(self) -> bool:
        """Tell whether the claim was confirmed a moment ago. For calls that do no harm if they come late."""
        return asyncio.get_running_loop().time() - self._confirmed_at <= ANSWER_SECONDS


def claim_next(epochs: Epochs) -> Claim:
    """Claim the epoch after the newest, whoever has that. From then on no earlier claim holds.

    A supervisor does so when it starts, and so does any other control plane that takes over. Raise SilentHeadError if
    Ray's head does not answer.
    """
    while True:
        before = epochs.numbers()
        number = max(before, default=0) + 1
        if epochs.add(number):
            with contextlib.suppress(SilentHeadError):  # Old epochs do no harm.
                for old in before:
                    epochs.remove(old)
            return Claim(epochs, number)


def claim_at_last(epochs: Epochs) -> Claim:
    """Claim the next epoch as soon as Ray's head answers. Ray never restarts an actor whose constructor raises."""
    while True:
        try:
            return claim_next(epochs)
        except SilentHeadError:
            time.sleep(RETRY_SECONDS)


@dataclass(frozen=True, slots=True)
class RayEpochs:
    """Epochs in the key-value store of the Ray cluster that this process is connected to."""

    namespace: str

    def numbers(self) -> list[int]:
        keys: list[bytes] = self._ask("internal_kv_keys", self._prefix)
        return numbers_of(keys)

    def add(self, number: int) -> bool:
        return bool(self._ask("internal_kv_put", self._key(number), b"", False))

    def remove(self, number: int) -> None:
        self._ask("internal_kv_del", self._key(number), False)

    @property
    def _prefix(self) -> bytes:
        return f"epoch:{self.namespace}:".encode()

    def _key(self, number: int) -> bytes:
        return self._prefix + str(number).encode()

    def _ask(self, method: str, *arguments: Any) -> Any:
        service = ray.experimental.internal_kv.internal_kv_get_gcs_client()  # type: ignore[no-untyped-call]
        try:
            # The limit makes Ray drop a question that still waits for a connection then.
            return getattr(service, method)(*arguments, namespace=NAMESPACE, timeout=ANSWER_SECONDS)
        except (RayError, OSError, TimeoutError):
            raise SilentHeadError from None


def numbers_of(keys: Iterable[bytes]) -> list[int]:
    """Return the numbers at the ends of these keys, each after the last colon. Leave out keys without one."""
    ends = (key.rpartition(b":")[2] for key in keys)
    return [int(end) for end in ends if end.isdigit()]
