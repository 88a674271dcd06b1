"""Keeps a cluster's announcement in Ray's key-value store, where the dashboard finds it.

Runs in the supervisor. While the store does not answer, the live page is out of date. Nothing else suffers.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from blockyard.deploy.dashboard.announcement import (
    KV_NAMESPACE,
    AnnouncedReplica,
    Announcement,
    encode,
    key_of,
)
from blockyard.deploy.ray.nodes import all_node_names
from blockyard.proto.naming.model_files import model_names
from ray.exceptions import RayError

if TYPE_CHECKING:
    from blockyard.deploy.supervision.replicas import Replica
    from blockyard.router.config import RouterConfig

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
REPEAT_LOOKS = 20
"""An unchanged announcement is stored again after this many checks, in case the store has lost it."""
KV_SECONDS = 2.0


def announcement_of(
    router: "RouterConfig", replicas: Iterable["Replica"], nodes: Mapping[str, str]
) -> Announcement:
    """Return the announcement of a cluster. `nodes` maps node ids to names."""
    return Announcement(
        cluster=router.cluster,
        model=model_names(router.model, router.model_names)[0],
        uses_tls=router.tls is not None,
        wants_certificate=router.tls is not None and router.tls.client_ca is not None,
        wants_token=router.auth_file is not None,
        replicas=tuple(
            AnnouncedReplica(
                name=replica.name,
                kind=replica.kind,
                phase=replica.phase,
                address=replica.address,
                incarnation=replica.incarnation,
                num_starts=replica.num_starts,
                model=replica.model,
                node=nodes.get(replica.node_id, ""),
                ranks=tuple((nodes.get(node_id, ""), pid) for node_id, pid in replica.ranks),
            )
            for replica in replicas
        ),
    )


async def keep_announced(router: Callable[[], "RouterConfig"], replicas: Sequence["Replica"]) -> None:
    """Store the announcement whenever it changes, until cancelled. It polls, because changes have many causes.

    `router` returns the config of routers with the models of now.
    """
    published, looks = b"", 0
    nodes: dict[str, str] = {}
    while True:
        node_ids = {replica.node_id for replica in replicas if replica.node_id}
        node_ids |= {node_id for replica in replicas for node_id, _ in replica.ranks}
        if not node_ids <= nodes.keys():
            nodes = dict.fromkeys(node_ids, "") | await _node_names()
        announcement = announcement_of(router(), replicas, nodes)
        now, looks = encode(announcement), looks + 1
        if now != published or looks % REPEAT_LOOKS == 0:
            published = now if await put(key_of(announcement.cluster), now) else b""
        await asyncio.sleep(LOOK_SECONDS)


async def _node_names() -> dict[str, str]:
    """Return each node's name by its id, from Ray's control service. Return nothing if Ray does not answer."""
    try:
        async with asyncio.timeout(KV_SECONDS):
            return await asyncio.to_thread(all_node_names)
    except (RayError, OSError, TimeoutError) as error:
        logger.debug("the live page shows no node names: Ray did not answer: %s", type(error).__name__)
        return {}


async def withdraw(cluster: str, namespace: bytes = KV_NAMESPACE) -> None:
    """Delete a cluster's entry from Ray's key-value store. If the store does not answer in time, the entry stays."""
    try:
        async with asyncio.timeout(KV_SECONDS):
            await _store().async_internal_kv_del(key_of(cluster), False, namespace=namespace)
    except (RayError, OSError, TimeoutError) as error:
        logger.warning(
            "Ray's store still has the entry of cluster %s in %s: %s",
            cluster,
            namespace.decode(),
            type(error).__name__,
        )


async def put(key: bytes, value: bytes, namespace: bytes = KV_NAMESPACE) -> bool:
    """Store a value in Ray's key-value store. Return False if the store did not accept it in time."""
    try:
        async with asyncio.timeout(KV_SECONDS):
            await _store().async_internal_kv_put(key, value, True, namespace=namespace)
    except (RayError, OSError, TimeoutError) as error:
        logger.debug(
            "Ray's store did not accept a value for %s: %s", namespace.decode(), type(error).__name__
        )
        return False
    return True


def _store() -> Any:
    return ray.experimental.internal_kv.internal_kv_get_gcs_client()  # type: ignore[no-untyped-call]
