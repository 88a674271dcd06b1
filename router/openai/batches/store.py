"""Store: files and batches of all tenants under one folder of the local disk.

- `owner.lock` is held by the router that runs the batches.
- `TENANT/files/file-ID.jsonl` has the lines of a file.
- `TENANT/files/file-ID.json` is its record, written last: a file without a record is not there yet.
- `TENANT/batches/batch_ID.json` is the record of a batch.
- `TENANT/batches/batch_ID.cancel` says that a client has asked for its end.

TENANT is a hash of the tenant's name, so no name is a path, and nobody finds what another tenant has. Ids are drawn
here, and another text is no id. Records are replaced as a whole. Every call blocks for the disk, so callers use
threads (../../admission/disk_turns.py). Every call may raise OSError. Several routers may use one folder. Only the
owner changes a batch after its creation.
"""

import fcntl
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from hashlib import sha256
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from blockyard.router.openai.batches.paths import ID
from blockyard.router.openai.batches.records import (
    EVERYTHING,
    BatchRecord,
    FileRecord,
    Query,
    batch_record,
)
from blockyard.router.openai.batches.room import Disk, LimitPassed, Room, sizes

R = TypeVar("R")
logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 200_000_000
MAX_TENANT_FILES = 1000
"""Files of a tenant, those of answers included that its unfinished batches will have."""
MAX_TENANT_BYTES = 4_000_000_000
"""Limit on the bytes of all files of a tenant, those of answers included."""
MAX_UNFINISHED = 100
MAX_BATCHES = 1000
"""Batches of a tenant that are remembered. Beyond it, the oldest that have ended are forgotten."""
LEAST_FREE_BYTES = 2**30
"""Space that uploads and answers leave free on the disk."""
UPLOAD_SECONDS = 3600
"""An upload that is older than this was interrupted."""
_ID = re.compile(ID)


def drawn_file_id() -> str:
    return f"file-{_drawn()}"


def drawn_batch_id() -> str:
    return f"batch_{_drawn()}"


def _drawn() -> str:
    """Return random digits behind those of the time, so that objects of one second are in their order by id."""
    return f"{time.time_ns():016x}{secrets.token_hex(8)}"


class TenantStore:
    """Files and batches of one tenant. An id that is unknown here, or is no id, has no record."""

    def __init__(self, folder: Path, records: "_Records", disk: Disk, room: Room) -> None:
        self._files, self._batches = folder / "files", folder / "batches"
        self._records, self._disk, self._room = records, disk, room

    def path(self, file_id: str) -> Path:
        """Return the path of a file's lines. Raises ValueError for a text that is no id."""
        return self._files / f"{_checked(file_id)}.jsonl"

    # Files

    def file(self, file_id: str) -> FileRecord | None:
        path = self._files / f"{file_id}.json"
        return self._records.read(path, _file_record) if is_id_here(file_id) else None

    def files(self, query: Query = EVERYTHING) -> list[FileRecord]:
        """Return the files that a query asks for. No other records are read, unless it asks for a purpose."""
        found = self._records.read_all(self._files, query.in_order(_ids(self._files)), _file_record)
        return list(islice((file for file in found if query.takes(file.purpose)), query.limit))

    def add_file(self, record: FileRecord) -> None:
        _write(self._files / f"{_checked(record.id)}.json", asdict(record))

    def remove_file(self, file_id: str) -> None:
        for path in (self._files / f"{_checked(file_id)}.json", self.path(file_id)):
            path.unlink(missing_ok=True)

    def upload(self, file_id: str) -> "Upload":
        return Upload(self, self.path(file_id))

    def check_upload(self) -> None:
        """Raise LimitPassed if there is no room for one more file, which may have the largest size."""
        self._check_files(1)
        if self._disk.free_bytes() < LEAST_FREE_BYTES + MAX_FILE_BYTES:
            raise LimitPassed("the disk of the server is full")

    def writing(self, num_bytes: int) -> AbstractContextManager[None]:
        """Take room for bytes that the context writes to a file of the tenant. Raises LimitPassed at its start."""
        return self._room.writing(num_bytes, most_bytes=MAX_TENANT_BYTES, least_free_bytes=LEAST_FREE_BYTES)

    def check_share(self, num_bytes: int) -> None:
        """Raise LimitPassed if bytes that the tenant uploads leave less to all others than the tenant has."""
        self._room.check_share(num_bytes, most_bytes=MAX_TENANT_BYTES, least_free_bytes=LEAST_FREE_BYTES)

    def _check_files(self, num_new: int) -> None:
        """Raise LimitPassed if there is no room for `num_new` files and a byte in them."""
        self._files.mkdir(parents=True, exist_ok=True, mode=0o700)
        to_come = {id for batch in self.unfinished() for id in (batch.output_file_id, batch.error_file_id)}
        _remove_interrupted(self._files, "*.part")
        # A router that was killed between a file and its record has left what nobody could delete.
        _remove_interrupted(self._files, "*.jsonl", but=to_come | _ids(self._files))
        if len(to_come.union(name for name, _ in sizes(self._files))) + num_new > MAX_TENANT_FILES:
            raise LimitPassed(
                f"there are {MAX_TENANT_FILES} files already, with those of answers to come: delete some"
            )
        with self.writing(0):
            pass

    # Batches

    def batch(self, batch_id: str) -> BatchRecord | None:
        path = self._batches / f"{batch_id}.json"
        return self._records.read(path, batch_record) if is_id_here(batch_id) else None

    def batches(self, query: Query = EVERYTHING) -> list[BatchRecord]:
        """Return the batches that a query asks for. No other records are read."""
        found = self._records.read_all(self._batches, query.in_order(_ids(self._batches)), batch_record)
        return list(islice(found, query.limit))

    def unfinished(self) -> list[BatchRecord]:
        """Return the batches that have not ended."""
        return self._records.unfinished(self._batches)

    def reads(self, file_id: str) -> bool:
        """Return whether a batch that has not ended reads this file."""
        return any(batch.input_file_id == file_id for batch in self.unfinished())

    def create(self, record: BatchRecord) -> None:
        """Add a new batch, and forget the oldest that have ended if there are too many. Raises LimitPassed."""
        unfinished = {batch.id for batch in self.unfinished()}
        if len(unfinished) >= MAX_UNFINISHED:
            raise LimitPassed(f"{MAX_UNFINISHED} batches have not ended yet")
        self._check_files(2)
        ids = _ids(self._batches)
        for batch_id in sorted(ids - unfinished)[: max(len(ids) + 1 - MAX_BATCHES, 0)]:
            for suffix in ("json", "cancel"):
                (self._batches / f"{batch_id}.{suffix}").unlink(missing_ok=True)
        self.save(record)

    def save(self, record: BatchRecord) -> None:
        _write(self._batches / f"{_checked(record.id)}.json", asdict(record))

    def cancel(self, batch_id: str) -> None:
        _created(self._batches / f"{_checked(batch_id)}.cancel").touch()

    def is_cancelled(self, batch_id: str) -> bool:
        return (self._batches / f"{_checked(batch_id)}.cancel").exists()


class Upload:
    """A file that a client is sending. `discard` follows whatever ends it, and may follow at any time."""

    def __init__(self, store: TenantStore, path: Path) -> None:
        self._store, self._path, self._part = store, path, path.with_suffix(".part")
        self._file: FileIO | None = None

    def begin(self) -> None:
        """Raises LimitPassed."""
        self._store.check_upload()
        self._file = FileIO(self._part, "wb")

    def write(self, piece: bytes) -> None:
        """Append a piece. Raises LimitPassed."""
        assert isinstance(self._file, FileIO)
        self._store.check_share(len(piece))
        with self._store.writing(len(piece)):
            left = memoryview(piece)
            while left:
                left = left[self._file.write(left) :]

    def keep(self, record: FileRecord) -> None:
        """Make it a file of the tenant."""
        assert isinstance(self._file, FileIO)
        os.fsync(self._file.fileno())
        self._part.replace(self._path)
        try:
            self._store.add_file(record)
        except BaseException:
            self._path.unlink(missing_ok=True)  # without a record nobody could delete it
            raise

    def discard(self) -> None:
        """Remove what is not kept."""
        if self._file is not None:
            self._file.close()
            self._part.unlink(missing_ok=True)


class Store:
    """All tenants' files and batches."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: int | None = None
        self._records = _Records()
        self._disk = Disk(folder)
        self._rooms: WeakValueDictionary[Path, Room] = WeakValueDictionary()

    def of(self, tenant: str) -> TenantStore:
        """Return what a tenant has. Called on one thread."""
        folder = self._folder / sha256(tenant.encode()).hexdigest()[:32]
        room = self._rooms.get(folder) or Room(folder / "files", self._disk)
        self._rooms[folder] = room
        return TenantStore(folder, self._records, self._disk, room)

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
            for files in self._folder.glob("*/files"):
                _remove_interrupted(files, "*.part")
        return True

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def unfinished(self) -> list[BatchRecord]:
        """Return the batches that have not ended, the oldest first."""
        folders = self._folder.glob("*/batches")
        found = [record for folder in folders for record in self._records.unfinished(folder)]
        return sorted(found, key=lambda record: (record.created_at, record.id))


def is_id_here(text: str) -> bool:
    """Return whether a text can be the id of a file or a batch."""
    return _ID.fullmatch(text) is not None


def _checked(name: str) -> str:
    if not is_id_here(name):
        raise ValueError("not an id of ours")
    return name


def _ids(folder: Path) -> set[str]:
    """Return the ids of the records in a folder, without reading them."""
    try:
        with os.scandir(folder) as entries:
            names = [os.path.splitext(entry.name) for entry in entries]
    except FileNotFoundError:
        return set()
    return {name for name, suffix in names if suffix == ".json" and is_id_here(name)}


def _remove_interrupted(files: Path, pattern: str, *, but: Set[str] = frozenset()) -> None:
    """Remove files that were not written lately, but not those of these ids."""
    for path in files.glob(pattern):
        with suppress(FileNotFoundError):
            if path.stem not in but and path.stat().st_mtime < time.time() - UPLOAD_SECONDS:
                path.unlink()


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
        self._ended: dict[Path, set[str]] = {}
        """Batches by folder that have ended or cannot be read, which are not read again."""

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

    def read_all(
        self, folder: Path, ids: Iterable[str], parsed: Callable[[dict[str, Any]], R]
    ) -> Iterator[R]:
        """Yield the records of these ids that can be read, each read as it is asked for."""
        records = (self.read(folder / f"{record_id}.json", parsed) for record_id in ids)
        return (record for record in records if record is not None)

    def unfinished(self, folder: Path) -> list[BatchRecord]:
        """Return the batches in a folder that have not ended."""
        ids = _ids(folder)
        ended = self._ended.get(folder, set()) & ids
        found = []
        for batch_id in sorted(ids - ended):
            path = folder / f"{batch_id}.json"
            record = self.read(path, batch_record)
            if record is not None and not record.has_ended:
                found.append(record)
            elif path.exists():
                ended.add(batch_id)
        if ended or folder in self._ended:
            self._ended[folder] = ended
        return found
