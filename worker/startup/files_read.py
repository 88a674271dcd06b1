"""Files read: the files from which a worker was loaded, and which of them have changed at their paths since.

Owns which files count: those of the model, of its tokenizer and of its draft model. Adapters are read when a router
adds them, and have fingerprints of their own. Does not own what a change means (deploy/supervision/supervisor.py).
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blockyard.proto.naming.model_files import FILE_SUFFIXES

SHARD_SUFFIX = ".safetensors"
MAX_NAMED = 3
"""Most files that `change` names."""
_State = tuple[int, int] | bytes | None
"""Size and time of last write of a shard, or the sha256 of another file. None: it cannot be read."""


@dataclass(frozen=True, slots=True)
class FilesRead:
    """States of the files in some folders at one moment."""

    folders: tuple[Path, ...]
    states: Mapping[Path, _State]

    @classmethod
    def of(cls, folders: Iterable[Path]) -> "FilesRead":
        folders = tuple(dict.fromkeys(folders))
        return cls(folders, {file: _state(file) for folder in folders for file in _files(folder)})

    def change(self, read_fingerprint: Callable[[], str], before: str) -> str:
        """Return in words what has changed since. Empty: nothing that counts.

        `read_fingerprint` reads the content of the first folder, which takes long, and `before` is what it was. It is
        called if nothing but the size or time of shards there differs.
        """
        now = FilesRead.of(self.folders).states
        files = sorted(
            file for file in self.states.keys() | now.keys() if self.states.get(file) != now.get(file)
        )
        if not files:
            return ""
        if all(file.suffix == SHARD_SUFFIX and file.parent == self.folders[0] for file in files):
            with suppress(ValueError, OSError):
                if read_fingerprint() == before:
                    return ""
        folder = files[0].parent
        if not folder.is_dir():
            return f"the folder {folder} is gone"
        named = ", ".join(file.name for file in files[:MAX_NAMED])
        more = f" and {len(files) - MAX_NAMED} more" if len(files) > MAX_NAMED else ""
        return f"the files at {folder} changed: {named}{more}"


NOTHING_READ = FilesRead((), {})


def _files(folder: Path) -> list[Path]:
    try:
        return [file for file in folder.iterdir() if file.suffix in FILE_SUFFIXES]
    except OSError:
        return []


def _state(file: Path) -> _State:
    try:
        if file.suffix == SHARD_SUFFIX:
            status = file.stat()
            return status.st_size, status.st_mtime_ns
        return hashlib.sha256(file.read_bytes()).digest()
    except OSError:
        return None
