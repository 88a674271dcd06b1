"""Store: files and batches of all tenants under one folder of the local disk.

- `owner.lock` is held by the router that runs the batches.
- `TENANT/files/file-ID.jsonl` has the lines of a file.
- `TENANT/files/file-ID.json` is its record, written last: a file without a record is not there yet.
- `TENANT/batches/batch_ID.json` is the record of a batch.
- `TENANT/batches/batch_ID.cancel` says that a client has asked for its end.

TENANT is a hash of the tenant's name, so no name is a path, and nobody finds what another tenant has. Ids are drawn
here, and another text is no id. Records are replaced as a whole. Every call blocks for the disk, so callers use
threads. Every call may raise OSError. Several routers may use one folder. Only the owner changes a batch after its
creation.
"""

import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from blockyard.router.openai.batches.records import BatchRecord, FileRecord, batch_record

R = TypeVar("R")
logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 200_000_000
MAX_TENANT_FILES = 1000
MAX_TENANT_BYTES = 4_000_000_000
"""Limit on the bytes of all files of a tenant, beyond which it uploads nothing more. Answers are still written."""
MAX_UNFINISHED = 100
MAX_BATCHES = 1000
"""Batches of a tenant that are remembered. Beyond it, the oldest that have ended are forgotten."""
LEAST_FREE_BYTES = 2**30
"""Space that uploads leave free on the disk."""
UPLOAD_SECONDS = 3600
"""An upload that is older than this was interrupted."""
_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{32}")


class LimitPassed(Exception):
    """The tenant or the disk has no room for another file or batch."""


def drawn_file_id() -> str:
    return f"file-{_drawn()}"


def drawn_batch_id() -> str:
    return f"batch_{_drawn()}"


def _drawn() -> str:
    """Return random digits behind those of the time, so that objects of one second are in their order by id."""
    return f"{time.time_ns():016x}{secrets.token_hex(8)}"


class TenantStore:
    """Files and batches of one tenant. An id that is unknown here, or is no id, has no record."""

    def __init__(self, folder: Path, records: "_Records") -> None:
        self._files, self._batches = folder / "files", folder / "batches"
        self._records = records

    def path(self, file_id: str) -> Path:
        """Return the path of a file's lines. Raises ValueError for a text that is no id."""
        return self._files / f"{_checked(file_id)}.jsonl"

    # Files

    def file(self, file_id: str) -> FileRecord | None:
        path = self._files / f"{file_id}.json"
        return self._records.read(path, _file_record) if is_id_here(file_id) else None

    def files(self) -> list[FileRecord]:
        return self._records.read_all(self._files, _file_record)

    def add_file(self, record: FileRecord) -> None:
        _write(self._files / f"{_checked(record.id)}.json", asdict(record))

    def remove_file(self, file_id: str) -> None:
        for path in (self._files / f"{_checked(file_id)}.json", self.path(file_id)):
            path.unlink(missing_ok=True)

    @contextmanager
    def upload(self, file_id: str) -> Iterator[BinaryIO]:
        """Yield a file to write the lines to. It is kept if the context ends without an error. Raises LimitPassed."""
        self._check_room()
        part = self.path(file_id).with_suffix(".part")
        try:
            with _created(part).open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.path(file_id))
        finally:
            part.unlink(missing_ok=True)

    def _check_room(self) -> None:
        files = self.files()
        if len(files) >= MAX_TENANT_FILES:
            raise LimitPassed(f"there are {MAX_TENANT_FILES} files already: delete some")
        if sum(record.num_bytes for record in files) >= MAX_TENANT_BYTES:
            raise LimitPassed(f"the files have {MAX_TENANT_BYTES} bytes already: delete some")
        self._files.mkdir(parents=True, exist_ok=True, mode=0o700)
        if shutil.disk_usage(self._files).free < LEAST_FREE_BYTES + MAX_FILE_BYTES:
            raise LimitPassed("the disk of the server is full")

    # Batches

    def batch(self, batch_id: str) -> BatchRecord | None:
        path = self._batches / f"{batch_id}.json"
        return self._records.read(path, batch_record) if is_id_here(batch_id) else None

    def batches(self) -> list[BatchRecord]:
        return self._records.read_all(self._batches, batch_record)

    def create(self, record: BatchRecord) -> None:
        """Add a new batch, and forget the oldest that have ended if there are too many. Raises LimitPassed."""
        batches = sorted(self.batches(), key=lambda batch: batch.created_at)
        ended = [batch for batch in batches if batch.has_ended]
        if len(batches) - len(ended) >= MAX_UNFINISHED:
            raise LimitPassed(f"{MAX_UNFINISHED} batches have not ended yet")
        for batch in ended[: max(len(batches) + 1 - MAX_BATCHES, 0)]:
            for suffix in ("json", "cancel"):
                (self._batches / f"{batch.id}.{suffix}").unlink(missing_ok=True)
        self.save(record)

    def save(self, record: BatchRecord) -> None:
        _write(self._batches / f"{_checked(record.id)}.json", asdict(record))

    def cancel(self, batch_id: str) -> None:
        _created(self._batches / f"{_checked(batch_id)}.cancel").touch()

    def is_cancelled(self, batch_id: str) -> bool:
        return (self._batches / f"{_checked(batch_id)}.cancel").exists()


class Store:
    """All tenants' files and batches."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: int | None = None
        self._records = _Records()
        self._ended: set[Path] = set()
        """Records of batches that have ended or cannot be read, which are not read again."""

    def of(self, tenant: str) -> TenantStore:
        return TenantStore(self._folder / sha256(tenant.encode()).hexdigest()[:32], self._records)

    def become_owner(self) -> bool:
        """Return whether this process is the one that runs the folder's batches, from now to its end."""
        if self._lock is None:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self._folder / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return False
            self._lock = descriptor
            self._remove_interrupted_uploads()
        return True

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def unfinished(self) -> list[BatchRecord]:
        """Return the batches that have not ended, the oldest first."""
        found = []
        paths = set(self._folder.glob("*/batches/*.json"))
        self._ended &= paths
        for path in paths - self._ended:
            record = self._records.read(path, batch_record)
            if record is not None and not record.has_ended:
                found.append(record)
            elif path.exists():
                self._ended.add(path)
        return sorted(found, key=lambda record: (record.created_at, record.id))

    def _remove_interrupted_uploads(self) -> None:
        for path in self._folder.glob("*/files/*.part"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - UPLOAD_SECONDS:
                    path.unlink()


def is_id_here(text: str) -> bool:
    """Return whether a text can be the id of a file or a batch."""
    return _ID.fullmatch(text) is not None


def _checked(name: str) -> str:
    if not is_id_here(name):
        raise ValueError("not an id of ours")
    return name


def _created(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def _write(path: Path, document: dict[str, Any]) -> None:
    """Replace a record as a whole."""
    part = _created(path).with_suffix(".new")
    with part.open("w", encoding="utf-8") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _file_record(document: dict[str, Any]) -> FileRecord:
    return FileRecord(**document)


class _Records:
    """Reads records of all tenants, from several threads. It logs one that cannot be read once, not at each list."""

    def __init__(self) -> None:
        self._told: set[Path] = set()

    def read(self, path: Path, parsed: Callable[[dict[str, Any]], R]) -> R | None:
        """Return a record, or None where there is none that can be read."""
        try:
            return parsed(json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            # Of another version, or harmed by a loss of power. Others can be read.
            if path not in self._told:
                self._told.add(path)
                logger.error("a record cannot be read: %s", path)
            return None

    def read_all(self, folder: Path, parsed: Callable[[dict[str, Any]], R]) -> list[R]:
        records = (self.read(path, parsed) for path in folder.glob("*.json"))
        return [record for record in records if record is not None]
