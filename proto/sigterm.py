"""Has SIGTERM end a process of Ray at once, as without Ray. Needs libc, since Python sets signals in its main thread
alone, and an actor's code runs in another."""

import ctypes
import signal


def end_at_sigterm() -> None:
    """For an actor, which under Ray's own handler waits for calls that never end: it hangs until it is killed."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
