"""What a cluster's supervisor tells whoever draws the cluster: its routers, and who should run.

Pure: the text of it, both ways. It lies in Ray's key-value store, which is as open as Ray itself, so it holds no
secret, no path and no text of an error. How it gets there is supervision/announcing.py's.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

KV_NAMESPACE = b"blockyard"
"""Nothing else may lie there."""
MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnouncedPlace:
    """A worker or router that should run. The words are the supervisor's (Place)."""

    name: str
    kind: str
    phase: str
    address: str
    incarnation: str
    num_starts: int
    node: str = ""
    """Where it runs, as Ray calls the node; empty while it runs nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """One cluster on this Ray."""

    cluster: str
    model: str
    uses_tls: bool
    wants_certificate: bool
    wants_token: bool
    places: tuple[AnnouncedPlace, ...]

    @property
    def routers(self) -> tuple[str, ...]:
        """Where routers serve, one address that several share once."""
        serving = (place for place in self.places if place.kind == "router" and place.address)
        return tuple(dict.fromkeys(place.address for place in serving))

    @property
    def workers(self) -> tuple[AnnouncedPlace, ...]:
        return tuple(place for place in self.places if place.kind == "worker")


def key_of(cluster: str) -> bytes:
    return cluster.encode()


def encode(announcement: Announcement) -> bytes:
    return json.dumps(asdict(announcement)).encode()


def decode(data: bytes) -> Announcement:
    """Raises ValueError for what no supervisor of this version has written."""
    if len(data) > MAX_BYTES:
        raise ValueError("an announcement of more than a megabyte")
    try:
        document: dict[str, Any] = json.loads(data)
        places = tuple(AnnouncedPlace(**place) for place in document.pop("places"))
        return Announcement(places=places, **document)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError("no announcement of this version") from error
