"""What operators have asked of a running cluster since `up`, kept where a supervisor that Ray starts again finds it.

Owns the value and its place: Ray's own key-value store, which lives as long as Ray's control service (and longer, where
that is fault tolerant). Does not own what follows from it (supervisor.py). Without it a supervisor that dies would
bring back the workers of `up`, and start those that somebody had taken out.
"""

import asyncio
import json
from dataclasses import asdict, dataclass
from typing import Protocol

from ray.experimental import internal_kv

SAVE_SECONDS = 10.0
FORGET_SECONDS = 2.0
"""Who ends a cluster waits no longer: the next of its name forgets it too."""
_KV_NAMESPACE = b"blockyard-wish"
"""Not the announcements', of which the dashboard reads all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What should run, where that is not what `up` said."""

    num_workers: int
    grace_seconds: float = 0.0
    """Of the last scaling: for those that still leave."""
    taken_out: frozenset[str] = frozenset()
    """Workers that somebody drained, and that are not to be started again by themselves."""
    addresses: tuple[tuple[str, str, str], ...] = ()
    """Of routers: name, address, and the gateway's. Where clients found them they are to find them again."""


class WishStore(Protocol):
    """Where a cluster's wish lies."""

    def load(self) -> Wish | None: ...

    async def save(self, wish: Wish) -> None: ...

    async def forget(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RayWishStore:
    """In the store of the Ray cluster that this process is connected to."""

    namespace: str

    def load(self) -> Wish | None:
        """None before anything was asked."""
        found: bytes | None = internal_kv._internal_kv_get(self._key, namespace=_KV_NAMESPACE)
        return None if found is None else decoded(found)

    async def save(self, wish: Wish) -> None:
        """Raises TimeoutError while Ray's control service is away."""
        async with asyncio.timeout(SAVE_SECONDS):
            await asyncio.to_thread(self._put, encoded(wish))

    async def forget(self) -> None:
        """Raises TimeoutError as `save` does."""
        async with asyncio.timeout(FORGET_SECONDS):
            await asyncio.to_thread(self.forget_now)

    def forget_now(self) -> None:
        internal_kv._internal_kv_del(self._key, namespace=_KV_NAMESPACE)

    def _put(self, text: bytes) -> None:
        internal_kv._internal_kv_put(self._key, text, overwrite=True, namespace=_KV_NAMESPACE)

    @property
    def _key(self) -> bytes:
        return f"wish:{self.namespace}".encode()


def encoded(wish: Wish) -> bytes:
    return json.dumps({**asdict(wish), "taken_out": sorted(wish.taken_out)}).encode()


def decoded(text: bytes) -> Wish:
    document = json.loads(text)
    addresses = tuple((name, address, gateway) for name, address, gateway in document.get("addresses", ()))
    return Wish(**{**document, "taken_out": frozenset(document["taken_out"]), "addresses": addresses})
