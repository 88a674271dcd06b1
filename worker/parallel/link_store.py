"""Link store: what ranks tell each other so that torch.distributed can connect them, such as addresses.

The values pass through the links, whose ends know the secret. Torch's own server would listen on every interface, for
anyone (CVE-2025-47277).
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

WAIT_SECONDS = 60.0


class LinkStore(dist.Store):  # type: ignore[name-defined, misc]
    """Implements torch's store for the few calls with which ranks meet. Thread-safe."""

    def __init__(self, tell: Callable[[str, bytes], object]) -> None:
        """`tell` gives a value to all other ranks, which call `put` with it."""
        super().__init__()
        self._tell = tell
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, key: str, value: bytes) -> None:
        """Keep what another rank tells."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """End all waits, because a rank is lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.put(key, data)
        self._tell(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta = timedelta(seconds=WAIT_SECONDS)) -> None:
        """Wait until all keys have values. Raises TimeoutError."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self.check(keys), timeout.total_seconds())
        if not self.check(keys):
            raise TimeoutError("the ranks have not met in time")
