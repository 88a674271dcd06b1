"""Makes a time-out's SIGTERM and a closed terminal's SIGHUP end a command as Ctrl-C does: with everything undone."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

ENDS = (signal.SIGTERM, signal.SIGHUP)
_asked = threading.Event()
"""An exception that a handler raises within a library's callback is printed there and lost; this is not."""


def end_like_ctrl_c() -> None:
    """From here on all three raise KeyboardInterrupt in the main thread."""
    for number in (*ENDS, signal.SIGINT):
        signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    _asked.set()
    raise KeyboardInterrupt


def raise_if_asked() -> None:
    """To be called between the steps of whatever takes long. Raises KeyboardInterrupt."""
    if _asked.is_set():
        raise KeyboardInterrupt


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Puts back, afterwards, what a library has set meanwhile (Ray's handler of SIGTERM aborts the process)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """What undoes a start is not to be interrupted in its turn."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (*ENDS, signal.SIGINT)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
