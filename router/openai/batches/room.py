"""Room: the bytes that a tenant's files may have, and the space that stays free on the disk.

Counts files as they lie on the disk, those included that are still being written. Whoever writes takes room first, so
uploads and answers pass no limit, however many run at once. Several routers may use one folder: what another one has
written counts within MEASURE_SECONDS. Does not own the limits (store.py).
"""

import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

MEASURE_SECONDS = 1.0
SUFFIXES = (".jsonl", ".part")
"""Suffixes of files with lines: complete ones and answers, and uploads that arrive."""


class LimitPassed(Exception):
    """The tenant or the disk has no room for another file, batch or line. `code` is that of the error in a batch."""

    def __init__(self, message: str, code: str = "batch_limit") -> None:
        super().__init__(message)
        self.code = code


class Disk:
    """The disk of a folder, with what is being written to it. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = Lock()
        self._writing_bytes = 0

    def free_bytes(self) -> int:
        """Return the free space, without what is being written. Raises OSError."""
        return shutil.disk_usage(self._folder).free - self._writing_bytes

    @contextmanager
    def writing(self, num_bytes: int, *, least_free_bytes: int) -> Iterator[None]:
        """Reserve space while it is written. Raises LimitPassed where less than `least_free_bytes` would stay free."""
        with self._lock:
            if self.free_bytes() - num_bytes < least_free_bytes:
                raise LimitPassed("the disk of the server is full", "disk_full")
            self._writing_bytes += num_bytes
        try:
            yield
        finally:
            with self._lock:
                self._writing_bytes -= num_bytes


class Room:
    """Room of one tenant's folder of files. Thread-safe: one thread at a time writes."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder, self._disk = folder, disk
        self._lock = Lock()
        self._used_bytes = 0
        self._measured_at = -math.inf

    @contextmanager
    def writing(self, num_bytes: int, *, most_bytes: int, least_free_bytes: int) -> Iterator[None]:
        """Take room for bytes that the context writes. Raises LimitPassed.

        The tenant's files have at most `most_bytes`, and `least_free_bytes` of the disk stay free.
        """
        with self._lock:
            self._check_used(num_bytes, most_bytes)
            with self._disk.writing(num_bytes, least_free_bytes=least_free_bytes):
                self._used_bytes += num_bytes
                yield

    def check_share(self, num_bytes: int, *, most_bytes: int, least_free_bytes: int) -> None:
        """Raise LimitPassed if the tenant would have more bytes than `most_bytes`, or than are left to all others.

        Left is what is free beyond `least_free_bytes`.
        """
        with self._lock:
            self._check_used(num_bytes, most_bytes)
            if self._used_bytes + num_bytes > self._disk.free_bytes() - num_bytes - least_free_bytes:
                message = "the disk of the server has no room for more files of this tenant: delete some"
                raise LimitPassed(message, "disk_full")

    def _check_used(self, num_bytes: int, most_bytes: int) -> None:
        is_old = time.monotonic() - self._measured_at >= MEASURE_SECONDS
        if is_old or self._used_bytes + num_bytes > most_bytes:
            self._measure()
        if self._used_bytes + num_bytes > most_bytes:
            raise LimitPassed(f"files may have {most_bytes} bytes: delete some", "storage_limit")

    def _measure(self) -> None:
        now = time.monotonic()
        self._used_bytes = sum(size for _, size in sizes(self._folder))
        self._measured_at = now


def sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the id and the bytes of each file with lines. Raises OSError."""
    try:
        entries = os.scandir(folder)
    except FileNotFoundError:
        return
    with entries:
        for entry in entries:
            name, suffix = os.path.splitext(entry.name)
            if suffix in SUFFIXES:
                with suppress(FileNotFoundError):
                    yield name, entry.stat(follow_symlinks=False).st_size
