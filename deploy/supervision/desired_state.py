"""Stores what operators have changed since `up`, routers' addresses and the cluster's handle in Ray.

A restarted supervisor finds them there, and so does a command without the cluster's state file (handles.py). The store
is Ray's own key-value store. It lives as long as Ray's control service, or longer where that is fault tolerant. Does
not own acting on the state (supervisor.py). Without it a restarted supervisor would go back to the number of workers
that `up` started. It would also start workers that an operator has taken out.

Each epoch (leadership.py) has a state of its own, and the newest counts. So what a supervisor wrote just before its
link dropped changes nothing if it arrives after another one has taken over.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from blockyard.deploy.supervision.leadership import numbers_of
from blockyard.deploy.supervision.model_plans import ModelPlan
from blockyard.router.config import ServedModel
from blockyard.worker.config import EngineConfig
from ray.experimental import internal_kv

SAVE_SECONDS = 10.0
FORGET_SECONDS = 2.0
"""Limit on the wait for the deletion when a cluster ends. A later cluster of the same name deletes the state too."""
KV_NAMESPACE = b"blockyard-wish"
"""Not the namespace of announcements, because the dashboard reads all of that one. The name is historical and stays,
so that the state of a running cluster is still found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    """Number of workers that should run, and what else must survive a restart of the supervisor."""

    num_workers: int
    """Workers of the first model."""
    serves_first: bool = True
    """False once the first model was removed."""
    grace_seconds: float = 0.0
    """Grace period of the last scaling. After a restart the supervisor gives it to workers that still have to leave."""
    taken_out: frozenset[str] = frozenset()
    """Workers that an operator has drained. The supervisor does not restart them by itself."""
    further_models: tuple[ModelPlan, ...] = ()
    """Models beside the first one."""
    addresses: tuple[tuple[str, str, str], ...] = ()
    """Each router's name, address and gateway address. A restarted router listens at the same addresses."""
    handle: Mapping[str, Any] = field(default_factory=dict)
    """Copy of `ClusterSpec.handle`."""


class DesiredStateStore(Protocol):
    """Store of one cluster's desired state."""

    def load(self) -> DesiredState | None: ...

    async def save(self, desired: DesiredState) -> None: ...

    async def forget(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RayDesiredStateStore:
    """The key-value store of the Ray cluster that this process is connected to."""

    namespace: str
    epoch: int = 0
    """Epoch that `save` writes for."""

    def load(self) -> DesiredState | None:
        """Return the state of the newest epoch that has one, or None if nothing was stored yet."""
        keys: list[bytes] = internal_kv._internal_kv_list(key_of(self.namespace, ""), namespace=KV_NAMESPACE)
        key = newest_key(self.namespace, keys)
        found: bytes | None = internal_kv._internal_kv_get(key, namespace=KV_NAMESPACE)
        return None if found is None else decoded(found)

    async def save(self, desired: DesiredState) -> None:
        """Store the state in place of the last one. Raise TimeoutError while Ray's control service is away."""
        async with asyncio.timeout(SAVE_SECONDS):
            await asyncio.to_thread(self._put, encoded(desired))

    async def forget(self) -> None:
        """Delete the stored state. Raise TimeoutError while Ray's control service is away."""
        async with asyncio.timeout(FORGET_SECONDS):
            await asyncio.to_thread(self.forget_now)

    def forget_now(self) -> None:
        prefix, before_epochs = key_of(self.namespace, ""), key_of(self.namespace)
        internal_kv._internal_kv_del(prefix, del_by_prefix=True, namespace=KV_NAMESPACE)
        internal_kv._internal_kv_del(before_epochs, namespace=KV_NAMESPACE)

    def _put(self, text: bytes) -> None:
        key = key_of(self.namespace, self.epoch)
        internal_kv._internal_kv_put(key, text, overwrite=True, namespace=KV_NAMESPACE)


def key_of(namespace: str, epoch: int | str | None = None) -> bytes:
    """Return the key of the desired state of the cluster in this namespace of Ray's, as an epoch has it.

    With "" it is the prefix of all epochs. Without an epoch it is the key of a supervisor of an earlier version.
    """
    return f"wish:{namespace}{'' if epoch is None else f':{epoch}'}".encode()


def newest_key(namespace: str, keys: Iterable[bytes]) -> bytes:
    """Return the key of the newest epoch among `keys`, those with the prefix of all epochs. Without any, return that of
    an earlier version."""
    return key_of(namespace, max(numbers_of(keys), default=None))


def encoded(desired: DesiredState) -> bytes:
    return json.dumps({**asdict(desired), "taken_out": sorted(desired.taken_out)}).encode()


def decoded(text: bytes) -> DesiredState:
    document = json.loads(text)
    addresses = tuple((name, address, gateway) for name, address, gateway in document.pop("addresses", ()))
    plans = tuple(_plan(plan) for plan in document.pop("further_models", ()))
    taken_out = frozenset(document.pop("taken_out"))
    return DesiredState(**document, taken_out=taken_out, addresses=addresses, further_models=plans)


def _plan(document: dict[str, Any]) -> ModelPlan:
    served, engine = document.pop("served"), document.pop("engine")
    names = tuple(served.pop("names"))
    # JSON has lists where settings have tuples.
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in engine.items()
    }
    return ModelPlan(served=ServedModel(**served, names=names), engine=EngineConfig(**settings), **document)
