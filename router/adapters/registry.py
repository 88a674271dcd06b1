"""Registry: the adapters that a router knows by name, and the changes that lead to them.

Changes have revisions, so they lead to the same adapters in any order and any number of times. Two routers that write
at once lose none. Pure. Does not own where changes are kept (log.py), or what workers are told (keeper.py).
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from operator import attrgetter

from blockyard.router.placement.adapters import Adapter

MAX_REMOVALS = 256
"""Removals that a log keeps when it is written anew, so that a router that has missed one learns of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredAdapter:
    """An adapter as it was added."""

    name: str
    """Name by which requests ask for it. No model has it."""
    fingerprint: str
    """Hash of its content. The same folder with another content is another adapter."""
    path: str
    """Folder within each worker's adapter folder."""
    rank: int = 0
    num_bytes: int = 0
    tenant: str = ""
    """Tenant that owns it. To others it does not exist. Empty: it is everybody's."""

    @property
    def to_place(self) -> Adapter:
        return Adapter(self.fingerprint, self.num_bytes)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a name: the adapter for which it stands from now on. None: it stands for nothing any more."""

    name: str
    adapter: RegisteredAdapter | None
    revision: int = 0
    """Higher than those of all changes that its router knew. Of two changes of a name, the higher one counts. Of two
    equal ones, the later one does."""

    def packed(self) -> bytes:
        adapter = None if self.adapter is None else asdict(self.adapter)
        document = {"name": self.name, "adapter": adapter, "revision": self.revision}
        return json.dumps(document, ensure_ascii=False).encode()

    @classmethod
    def unpacked(cls, packed: bytes) -> "Change":
        """Return the change. Fields of a newer router are ignored."""
        document = json.loads(packed)
        known = {field.name for field in fields(RegisteredAdapter)}
        adapter, revision = document["adapter"], document.get("revision", 0)
        if adapter is None:
            return cls(document["name"], None, revision)
        registered = RegisteredAdapter(**{k: v for k, v in adapter.items() if k in known})
        return cls(document["name"], registered, revision)


class AdapterRegistry:
    """Adapters by name."""

    def __init__(self) -> None:
        self._newest: dict[str, Change] = {}
        """The change that counts, by name."""

    def find(self, name: str, tenant: str | None = None) -> RegisteredAdapter | None:
        """Return the adapter of this name, or None if there is none or it is another tenant's. None as tenant sees
        all."""
        change = self._newest.get(name)
        found = None if change is None else change.adapter
        return found if found is not None and _is_visible(found, tenant) else None

    def listed(self, tenant: str | None = None) -> list[RegisteredAdapter]:
        """Return the adapters that a tenant sees, ordered by name. None sees all."""
        adapters = (self._newest[name].adapter for name in sorted(self._newest))
        return [adapter for adapter in adapters if adapter is not None and _is_visible(adapter, tenant)]

    def change(self, name: str, adapter: RegisteredAdapter | None) -> Change:
        """Return a change that counts more than all that are known. It is not applied."""
        known = (change.revision for change in self._newest.values())
        return Change(name, adapter, 1 + max(known, default=0))

    def apply(self, *changes: Change) -> None:
        for change in changes:
            known = self._newest.get(change.name)
            if known is None or change.revision >= known.revision:
                self._newest[change.name] = change

    def missing(self, changes: Iterable[Change]) -> list[Change]:
        """Return the changes of adapters that these changes, which are applied, do not lead to."""
        found = set(changes)
        return [change for change in self.changes() if change.adapter is not None and change not in found]

    def changes(self) -> list[Change]:
        """Return the changes that lead from nothing to the adapters as they are now, and the latest removals."""
        ordered = sorted(self._newest.values(), key=attrgetter("revision", "name"))
        removals = [change for change in ordered if change.adapter is None]
        return [*removals[-MAX_REMOVALS:], *(change for change in ordered if change.adapter is not None)]


def _is_visible(adapter: RegisteredAdapter, tenant: str | None) -> bool:
    return tenant is None or adapter.tenant in ("", tenant)
