"""Makes SIGTERM and a closed terminal's SIGHUP end a command as Ctrl-C does, so that it undoes what it started."""

import contextlib
import errno
import os
import signal
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDS = (signal.SIGTERM, signal.SIGHUP)
_asked = threading.Event()
"""Set by the signal handler, because an exception raised inside a library's callback may be printed there and lost."""


def end_like_ctrl_c() -> None:
    """Make SIGTERM, SIGHUP and SIGINT raise KeyboardInterrupt in the main thread.

    A SIGHUP that `nohup` ignores stays ignored. After the first signal, only SIGINT raises again.
    """
    for number in (*ENDS, signal.SIGINT):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    _leave_closed_terminal()
    # A closed terminal may send both signals. The second one must not stop the shutdown that the first one began.
    if number != signal.SIGINT and _asked.is_set():
        return
    _asked.set()
    raise KeyboardInterrupt


def _leave_closed_terminal() -> None:
    """Discard further output to a closed terminal, because each write there would fail and stop the shutdown."""
    for stream in (sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed or missing
            descriptor = stream.fileno()  # type: ignore[union-attr]
            if _is_closed_terminal(descriptor):
                discard_output(descriptor)


def discard_output(descriptor: int) -> None:
    """Redirect this file descriptor to the null device."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _is_closed_terminal(descriptor: int) -> bool:
    try:
        termios.tcgetattr(descriptor)
    except termios.error as error:
        return bool(error.args[0] == errno.EIO)
    return False


def raise_if_asked() -> None:
    """Raise KeyboardInterrupt if one of the three signals has come. Long operations call it between steps."""
    if _asked.is_set():
        raise KeyboardInterrupt


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Restore the handlers of SIGTERM and SIGHUP after the block, in case a library changes them there.

    Do nothing outside the main thread. Ray's handler of SIGTERM aborts the process, and Ray's shutdown resets it to the
    default.
    """
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
    """Ignore SIGTERM, SIGHUP and SIGINT inside the block, so that undoing a start is not interrupted.

    Do nothing outside the main thread.
    """
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
