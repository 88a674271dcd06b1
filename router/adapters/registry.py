"""Registry: the adapters that a router knows by name, and the changes that lead to them.

Pure. Does not own where changes are kept (log.py), or what workers are told (keeper.py).
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

from blockyard.router.placement.adapters import Adapter


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

    def packed(self) -> bytes:
        adapter = None if self.adapter is None else asdict(self.adapter)
        return json.dumps({"name": self.name, "adapter": adapter}, ensure_ascii=False).encode()

    @classmethod
    def unpacked(cls, packed: bytes) -> "Change":
        """Return the change. Fields of a newer router are ignored."""
        document = json.loads(packed)
        known = {field.name for field in fields(RegisteredAdapter)}
        adapter = document["adapter"]
        if adapter is None:
            return cls(document["name"], None)
        return cls(document["name"], RegisteredAdapter(**{k: v for k, v in adapter.items() if k in known}))


class AdapterRegistry:
    """Adapters by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, RegisteredAdapter] = {}

    def find(self, name: str, tenant: str | None = None) -> RegisteredAdapter | None:
        """Return the adapter of this name, or None if there is none or it is another tenant's. None as tenant sees
        all."""
        found = self._by_name.get(name)
        return found if found is not None and _is_visible(found, tenant) else None

    def listed(self, tenant: str | None = None) -> list[RegisteredAdapter]:
        """Return the adapters that a tenant sees, ordered by name. None sees all."""
        return [
            self._by_name[name] for name in sorted(self._by_name) if _is_visible(self._by_name[name], tenant)
        ]

    def apply(self, change: Change) -> None:
        if change.adapter is None:
            self._by_name.pop(change.name, None)
        else:
            self._by_name[change.name] = change.adapter

    def replay(self, changes: Iterable[Change]) -> None:
        """Start anew with these changes."""
        self._by_name.clear()
        for change in changes:
            self.apply(change)

    def changes(self) -> list[Change]:
        """Return changes that lead from nothing to the adapters as they are now."""
        return [Change(adapter.name, adapter) for adapter in self.listed()]


def _is_visible(adapter: RegisteredAdapter, tenant: str | None) -> bool:
    return tenant is None or adapter.tenant in ("", tenant)
