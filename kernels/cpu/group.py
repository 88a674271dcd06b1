"""Collectives of ranks that are processes of one machine, over shared memory, and messages from rank 0 to the others.

Owns the shared memory, the checks before addresses leave Python, and what the end of a rank becomes: an error in all
others. Does not notice that end: the caller watches the ranks and calls `abort` (worker/parallel/). Must never import
triton.

Shapes: S rows, V columns of one rank.
"""

import ctypes
import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch
from blockyard.kernels.cpu.checks import need
from blockyard.kernels.cpu.library import AllReduce, Broadcast, Concatenation, CpuLibrary, Group

MAX_RANKS = 16
"""Native code reserves room for this many."""
PIECE_BYTES, DEPTH = 256 * 2**10, 2
MESSAGE_PIECE_BYTES, MESSAGE_DEPTH = 256 * 2**10, 4
DEADLINE_SECONDS = 60.0
"""Longest wait for another rank within a call."""
_FOLDER = Path("/dev/shm")
_DTYPES = (torch.float32, torch.bfloat16)
_MORE = 1 << 62
_ABORTED = 1
_REASONS = {
    _ABORTED: "another rank has ended",
    2: "another rank does not answer within {:g} s",
    3: "another rank computes something else",
    4: "another rank has failed",
}


class RankLost(RuntimeError):
    """Says that another rank has failed in this step, does not answer, or has ended, after which every step fails."""


class SharedMemory:
    """Memory that several processes of one user map. It is gone when the last of them has ended."""

    def __init__(self, name: str, num_bytes: int, *, is_new: bool) -> None:
        self.name = name
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if is_new else 0)
        file = os.open(_FOLDER / name, flags, 0o600)
        try:
            if is_new:
                # Otherwise a full /dev/shm would end a process with SIGBUS at its first write.
                os.posix_fallocate(file, 0, num_bytes)
            self._map = mmap.mmap(file, num_bytes)
        except BaseException:
            if is_new:
                self.unlink()
            raise
        finally:
            os.close(file)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def create(cls, num_bytes: int) -> Self:
        """Make memory of zeros under a random name, which only this user may open. Raises OSError."""
        return cls(f"blockyard-{secrets.token_hex(16)}", num_bytes, is_new=True)

    @classmethod
    def open(cls, name: str, num_bytes: int) -> Self:
        """Map what another process has made. Raises OSError."""
        if "/" in name:
            raise ValueError(f"{name!r} is no name of shared memory")
        return cls(name, num_bytes, is_new=False)

    def unlink(self) -> None:
        """Remove the name. Those who have mapped the memory keep it."""
        (_FOLDER / self.name).unlink(missing_ok=True)


class RankGroup:
    """One rank's end of a group. Every rank makes the same calls in the same order, from one thread at a time.

    Where a rank leaves a step by an exception, every call of that step raises RankLost in the others.
    """

    def __init__(
        self,
        library: Callable[[], CpuLibrary],
        *,
        rank: int,
        size: int,
        name: str | None = None,
        piece_bytes: int = PIECE_BYTES,
        depth: int = DEPTH,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        """Make the shared memory, or map what has this `name`. `library` returns where calls go to at that time.

        Raises OSError where the memory cannot be made or mapped.
        """
        need(0 <= rank < size <= MAX_RANKS, "rank {} of {}", rank, size)
        self.rank, self.size = rank, size
        self._library = library
        num_bytes = library().group_bytes(size, depth, piece_bytes)
        self.memory = SharedMemory.create(num_bytes) if name is None else SharedMemory.open(name, num_bytes)
        self._group = Group(
            shared=self.memory.address,
            rank=rank,
            size=size,
            depth=depth,
            piece_bytes=piece_bytes,
            deadline_ns=int(deadline_seconds * 1e9),
        )
        self._reference = ctypes.pointer(self._group)

    @property
    def is_aborted(self) -> bool:
        """Whether a call has found that a rank has called `abort`."""
        return bool(self._group.status == _ABORTED)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Take part in a step, whose number is higher than that of every earlier one. Raises RankLost at its end."""
        self._library().enter(self._reference, number)
        try:
            yield
            self.check()
        except BaseException:
            self._library().fail(self._reference)
            raise

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace x by the sum over all ranks, the same bits in each: added in fp32 in the order of ranks.

        Raises RankLost.
        """
        need(
            x.dtype in _DTYPES and x.is_contiguous() and x.is_cpu,
            "{} in pieces, or in another memory",
            x.dtype,
        )
        work = AllReduce(group=self._reference, x=x.data_ptr(), count=x.numel())
        self._library().all_reduce(x.dtype == torch.bfloat16, torch.get_num_threads(), work)
        self.check()

    def gather(self, x_SV: torch.Tensor) -> torch.Tensor | None:
        """Return the columns of all ranks side by side in rank 0, and None in the others. Raises RankLost."""
        need(x_SV.is_contiguous() and x_SV.is_cpu, "a tensor in pieces, or in another memory")
        num_rows, width = x_SV.shape
        out_SV = x_SV.new_empty(num_rows, self.size * width) if self.rank == 0 else None
        work = Concatenation(
            group=self._reference,
            x=x_SV.data_ptr(),
            out=None if out_SV is None else out_SV.data_ptr(),
            num_rows=num_rows,
            row_bytes=width * x_SV.itemsize,
        )
        self._library().concatenate(False, 1, work)
        self.check()
        return out_SV

    def broadcast(self, x: torch.Tensor) -> None:
        """Replace x by that of rank 0. Raises RankLost."""
        need(x.is_contiguous() and x.is_cpu, "a tensor in pieces, or in another memory")
        work = Broadcast(group=self._reference, x=x.data_ptr(), bytes=x.nbytes)
        self._library().broadcast(False, 1, work)
        self.check()

    def abort(self) -> None:
        """Let all calls of all ranks raise RankLost, now and later. Any thread may call this."""
        self._library().abort(self._reference)

    def check(self) -> None:
        """Raise RankLost where a call of this step has failed, also one that was replayed."""
        if self._group.status:
            raise RankLost(_REASONS[self._group.status].format(self._group.deadline_ns / 1e9))


class MessageRing(RankGroup):
    """Messages of bytes from rank 0 to all others. None of them waits for an idle rank 0 in vain: `abort` ends it."""

    def __init__(
        self, library: Callable[[], CpuLibrary], *, rank: int, size: int, name: str | None = None
    ) -> None:
        super().__init__(
            library,
            rank=rank,
            size=size,
            name=name,
            piece_bytes=MESSAGE_PIECE_BYTES,
            depth=MESSAGE_DEPTH,
            deadline_seconds=DEADLINE_SECONDS if rank == 0 else 0.0,
        )
        self._start = ctypes.c_void_p()

    def send(self, message: memoryview) -> None:
        """Send a message from rank 0. Waits only where another rank is several messages behind. Raises RankLost."""
        data = message.cast("B")
        need(self.rank == 0 and len(data) > 0, "an empty message, or one of rank {}", self.rank)
        start = ctypes.c_char.from_buffer(data)
        self._library().send(self._reference, ctypes.addressof(start), len(data))
        self.check()

    def receive(self) -> bytearray:
        """Wait for the next message, and return it in memory of its own. Raises RankLost."""
        pieces, follows = [], True
        while follows:
            piece = self._library().receive(self._reference, ctypes.byref(self._start))
            self.check()
            pieces.append(part := bytearray(piece & ~_MORE))
            ctypes.memmove(ctypes.byref(ctypes.c_char.from_buffer(part)), self._start, len(part))
            follows = bool(piece & _MORE)
        return pieces[0] if len(pieces) == 1 else bytearray().join(pieces)
