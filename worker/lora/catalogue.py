"""Catalogue: the adapters of a worker by name, in host memory.

A folder that has not changed since it was read is not read again. So each router may add all adapters to each worker
that it meets. Owns names. Does not own the content of folders (peft.py) or what runs (the engine).
"""

from dataclasses import dataclass
from threading import Lock

from blockyard.worker.lora.peft import AdapterReader, FileState
from blockyard.worker.sequences.adapter import Adapter

MAX_ADAPTERS = 1024
"""More names than any host has memory for adapters of a usual size."""


class CatalogueFull(ValueError):
    """The worker has MAX_ADAPTERS adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedAdapter:
    name: str
    path: str
    state: FileState
    adapter: Adapter


class AdapterCatalogue:
    """Thread-safe, because folders are read beside the event loop."""

    def __init__(self, reader: AdapterReader) -> None:
        self._reader = reader
        self._named: dict[str, NamedAdapter] = {}
        self._lock = Lock()

    def add(self, name: str, path: str) -> tuple[NamedAdapter, str]:
        """Read the adapter in a folder, and give it a name. Return it, and the fingerprint of what the name stood for
        before if no name stands for that any more, else "".

        Raises as `AdapterReader.read`, and CatalogueFull.
        """
        with self._lock:
            before = self._named.get(name)
            if before is None and len(self._named) >= MAX_ADAPTERS:
                raise CatalogueFull(f"the worker has {MAX_ADAPTERS} adapters")
            state = self._reader.state(path)
            if before is not None and (before.path, before.state) == (path, state):
                return before, ""
            adapter = self._reader.read(path)
            known = (one.adapter for one in self._named.values())
            adapter = next((one for one in known if one.fingerprint == adapter.fingerprint), adapter)
            named = self._named[name] = NamedAdapter(name=name, path=path, state=state, adapter=adapter)
            return named, "" if before is None else self._unnamed(before.adapter)

    def remove(self, name: str) -> str:
        """Forget a name. Return the fingerprint of its content if no other name has it, else "". Raises KeyError."""
        with self._lock:
            return self._unnamed(self._named.pop(name).adapter)

    def _unnamed(self, adapter: Adapter) -> str:
        is_named = any(one.adapter is adapter for one in self._named.values())
        return "" if is_named else adapter.fingerprint

    def all(self) -> list[NamedAdapter]:
        """Return all adapters in order of their names."""
        with self._lock:
            return [self._named[name] for name in sorted(self._named)]
