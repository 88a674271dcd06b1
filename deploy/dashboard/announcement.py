"""Announcement of a cluster to the live page: its routers, and the workers and routers that should run. Pure.

Owns encoding and decoding. The announcement is in Ray's key-value store, which is as open as Ray itself, so it holds no
secret, no path and no error text. Does not own writing it there (supervision/announcing.py).
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

KV_NAMESPACE = b"blockyard"
"""Namespace for announcements only, because the dashboard reads all of it."""
MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnouncedReplica:
    """A worker or router that should run. All fields but `node` are those of the supervisor's Replica."""

    name: str
    kind: str
    phase: str
    address: str
    incarnation: str
    num_starts: int
    model: str = ""
    """Id of a worker's model. Empty for a router."""
    node: str = ""
    """Hostname and address of its node. Empty if they are not known."""
    ranks: tuple[tuple[str, int], ...] = ()
    """Node and process id of each rank, if a worker has several. The first is the worker's own process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """One cluster on this Ray, as the live page needs to know it."""

    cluster: str
    model: str
    """Id of the default model."""
    uses_tls: bool
    wants_certificate: bool
    wants_token: bool
    replicas: tuple[AnnouncedReplica, ...]

    @property
    def routers(self) -> tuple[str, ...]:
        """Return the addresses of routers that serve or have served. An address that several share appears once."""
        serving = (replica for replica in self.replicas if replica.kind == "router" and replica.address)
        return tuple(dict.fromkeys(replica.address for replica in serving))

    @property
    def workers(self) -> tuple[AnnouncedReplica, ...]:
        return tuple(replica for replica in self.replicas if replica.kind == "worker")


def key_of(cluster: str) -> bytes:
    return cluster.encode()


def encode(announcement: Announcement) -> bytes:
    document = asdict(announcement)
    return json.dumps({"places": document.pop("replicas"), **document}).encode()


def decode(data: bytes) -> Announcement:
    """Decode an announcement. Raise ValueError for a text that no supervisor of this version has written."""
    if len(data) > MAX_BYTES:
        raise ValueError("an announcement of more than a megabyte")
    try:
        document: dict[str, Any] = json.loads(data)
        replicas = tuple(_replica(place) for place in document.pop("places"))
        return Announcement(replicas=replicas, **document)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError("no announcement of this version") from error


def _replica(place: dict[str, Any]) -> AnnouncedReplica:
    ranks = tuple((str(node), int(pid)) for node, pid in place["ranks"])
    return AnnouncedReplica(**{**place, "ranks": ranks})
