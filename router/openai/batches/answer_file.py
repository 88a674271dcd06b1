"""Answer files: lines that are written whole, one at a time, and survive the end of the process.

A line counts as written once it ends with a line feed. What an interrupted write leaves behind it is cut off before the
file is written again.
"""

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self


class Answers:
    """The two answer files of a batch: of good answers, and of errors. Threads may share it."""

    def __init__(
        self,
        output: Path,
        errors: Path,
        writing: Callable[[int], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Open both files and cut off unfinished lines. `writing` takes room for the bytes that its context writes.

        Raises OSError.
        """
        self._lock = Lock()
        self._writing = writing
        with ExitStack() as opening:
            self._good = opening.enter_context(_AnswerFile(output))
            self._bad = opening.enter_context(_AnswerFile(errors))
            self._closing = opening.pop_all()
        self._is_closed = False

    def __contains__(self, custom_id: str) -> bool:
        return custom_id in self._good.custom_ids or custom_id in self._bad.custom_ids

    @property
    def num_good(self) -> int:
        return len(self._good.custom_ids)

    @property
    def num_bad(self) -> int:
        return len(self._bad.custom_ids)

    def append(self, custom_id: str, line: bytes, *, is_good: bool) -> None:
        """Write the answer of a request, unless the request has one. Raises OSError, or what `writing` raises.

        The thread of a cancelled task may come late: then the request has an answer, or will get one from the next run.
        """
        with self._lock:
            if custom_id not in self and not self._is_closed:
                with self._writing(len(line)):
                    (self._good if is_good else self._bad).append(custom_id, line)

    def sync(self) -> None:
        """Make the lines survive a loss of power too. Raises OSError."""
        self._good.sync()
        self._bad.sync()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._closing.close()


class _AnswerFile:
    """One file that is open for appending. Every call may raise OSError."""

    def __init__(self, path: Path) -> None:
        """Open the file, create it if necessary, and cut off an unfinished line."""
        self.custom_ids: set[str] = set()
        """Ids of all its lines."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._num_bytes = self._read()
        os.ftruncate(self._descriptor, self._num_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def append(self, custom_id: str, line: bytes) -> None:
        """Write a line. If the disk takes a part of it alone, cut this part off and raise."""
        try:
            written = 0
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError:
            os.ftruncate(self._descriptor, self._num_bytes)
            raise
        self._num_bytes += len(line)
        self.custom_ids.add(custom_id)

    def sync(self) -> None:
        """Make the lines survive a loss of power too."""
        os.fsync(self._descriptor)

    def _read(self) -> int:
        """Read the ids of whole lines. Return the bytes of these lines."""
        num_bytes = 0
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            for line in file:
                try:
                    custom_id = json.loads(line)["custom_id"] if line.endswith(b"\n") else None
                except (ValueError, KeyError, TypeError):
                    # A loss of power may leave anything behind the last line that was synced.
                    custom_id = None
                if not isinstance(custom_id, str):
                    break
                num_bytes += len(line)
                self.custom_ids.add(custom_id)
        return num_bytes
