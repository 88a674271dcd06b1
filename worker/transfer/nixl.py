"""NIXL: reads blocks in another worker's memory over RDMA, or what else UCX finds, where both workers have it.

The source says where a block is, with its checksum, and keeps it until it hears that it was read. The destination
alone transfers, always by READ. A READ that is given up may still write: NIXL 1.5.1 over TCP does so after it has
released the transfer. So it writes into staging memory that nothing else uses, and that is used again only once it has
ended.

NIXL's own traffic has neither TLS nor the cluster's secret. Does not own the messages (wire.py).
"""

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from blockyard.worker.transfer.wire import Cut, Place, ProtocolError

logger = logging.getLogger(__name__)

NIXL = "nixl"
"""Name of this way in requests and replies."""
MAX_STAGED = 64
"""Staging buffers, of a block each. Those of transfers that never end are lost. Once all are, blocks come over TCP."""
POLL_SECONDS = 0.0002
FAILED = "ERR"
UNDER_WAY = "PROC"


class NixlAgent:
    """NIXL in this process. Threads of a transfer share it."""

    def __init__(self, incarnation: str, regions: Sequence[Place], block_bytes: int) -> None:
        """Let others read `regions` of this process's memory. Raises ValueError where NIXL is not installed."""
        try:
            from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
        except ImportError as error:
            raise ValueError(
                f"--nixl needs the package nixl ({error}); install it with: pip install 'blockyard[nixl]'"
            ) from error
        config = nixl_agent_config(backends=["UCX"], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        self._agent: Any = nixl_agent(incarnation, config)
        self.trial = memoryview(bytearray(b"\x55") * block_bytes)
        """A block without meaning that others may read, to measure the link."""
        self._register([*regions, (address_of(self.trial), block_bytes)])
        self.access: bytes = self._agent.get_agent_metadata()
        """The data by which others find the regions."""
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._known: dict[bytes, str] = {}
        """The name of each source in NIXL, by its access."""
        self._free: list[memoryview] = []
        self._abandoned: list[tuple[Any, memoryview]] = []
        """Transfers that are under way though nobody waits for them, with their staging buffers."""
        self._num_staged = 0

    def _register(self, regions: Sequence[Place]) -> None:
        self._agent.register_memory([(*region, 0, "") for region in regions], "DRAM", ["UCX"])

    def memory_of(self, access: bytes, check: Callable[[], None]) -> "NixlMemory":
        """Return the memory of a source. `check` raises Late or NotWanted. Raises ProtocolError for bad access."""
        with self._lock:
            if access not in self._known:
                try:
                    self._known[access] = self._agent.add_remote_agent(access)
                except Exception as error:
                    raise ProtocolError("what is no access to memory by NIXL") from error
        return NixlMemory(self, access, self._known[access], check)

    def forget(self, access: bytes) -> None:
        """Drop a source that cannot be reached any more."""
        with self._lock:
            name = self._known.pop(access, None)
            if name is not None:
                try:
                    self._agent.remove_remote_agent(name)
                except Exception as error:
                    logger.warning("NIXL does not forget a worker: %s", type(error).__name__)

    def has_staging(self) -> bool:
        """Return whether a staging buffer is left."""
        self._reclaim()
        with self._lock:
            return bool(self._free) or self._num_staged < MAX_STAGED

    def begin_read(self, name: str, places: list[Place]) -> tuple[Any, memoryview]:
        """Begin to read pieces of a source into a staging buffer. Raises Cut where that fails."""
        buffer = self._staging()
        start = address_of(buffer)
        ours = []
        for _, length in places:
            ours.append((start, length, 0))
            start += length
        agent = self._agent
        try:
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(ours, "DRAM"),
                agent.get_xfer_descs([(*place, 0) for place in places], "DRAM"),
                name,
            )
        except Exception as error:  # NIXL has many, and nothing writes to the buffer yet
            with self._lock:
                self._free.append(buffer)
            raise Cut from error
        try:
            has_failed = agent.transfer(handle) == FAILED
        except Exception as error:  # NIXL has many
            raise _lost(error) from error
        if has_failed:
            raise _lost(None)
        return handle, buffer

    def is_under_way(self, handle: Any) -> bool:
        """Return whether a transfer still reads. Raises Cut where it failed."""
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception as error:
            raise _lost(error) from error
        if state == FAILED:
            raise _lost(None)
        return bool(state == UNDER_WAY)

    def done(self, handle: Any, buffer: memoryview) -> None:
        """Give back a transfer that has ended well, and its staging buffer."""
        self._agent.release_xfer_handle(handle)
        with self._lock:
            self._free.append(buffer)

    def abandon(self, handle: Any, buffer: memoryview) -> None:
        """Take a transfer for whose end nobody waits. Its staging buffer is not used again before that end."""
        with self._lock:
            self._abandoned.append((handle, buffer))

    def _staging(self) -> memoryview:
        self._reclaim()
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._num_staged >= MAX_STAGED:
                raise Cut
            self._num_staged += 1
            buffer = memoryview(bytearray(self._block_bytes))
            self._register([(address_of(buffer), len(buffer))])
            return buffer

    def _reclaim(self) -> None:
        with self._lock:
            abandoned, self._abandoned = self._abandoned, []
        for handle, buffer in abandoned:
            try:
                if self.is_under_way(handle):
                    self.abandon(handle, buffer)
                else:
                    self.done(handle, buffer)
            except Cut:
                pass  # Its buffer is lost.


class NixlMemory:
    """Implements Memory: that of one source, for one pull."""

    def __init__(self, agent: NixlAgent, access: bytes, name: str, check: Callable[[], None]) -> None:
        self._agent = agent
        self._access = access
        self._name = name
        self._check = check

    def read(self, places: list[Place], into: memoryview) -> None:
        try:
            handle, buffer = self._agent.begin_read(self._name, places)
            try:
                while self._agent.is_under_way(handle):
                    self._check()
                    time.sleep(POLL_SECONDS)
            except Cut:
                raise
            except BaseException:
                self._agent.abandon(handle, buffer)
                raise
        except Cut:
            self._agent.forget(self._access)
            raise
        into[:] = buffer
        self._agent.done(handle, buffer)


def _lost(error: Exception | None) -> Cut:
    """Log that a transfer has failed, at most once for each staging buffer, and return what to raise.

    The transfer may still write to its buffer, so the buffer is lost.
    """
    name = "no reason" if error is None else type(error).__name__
    logger.warning(
        "a transfer by NIXL has failed (%s), and one of %d staging buffers is lost", name, MAX_STAGED
    )
    return Cut()


def address_of(view: memoryview) -> int:
    """Return the address of a writable buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
