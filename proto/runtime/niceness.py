"""Niceness: takes back the low priority at which Ray starts its workers.

Ray adds 15 to the niceness of its workers by default, so that any other program takes their cores. `up` starts its own
Ray without that. A Ray that others started may still do it.
"""

import contextlib
import logging
import os

NICENESS_VARIABLE = "RAY_worker_niceness"
"""Ray's variable of a node. If an operator has set it, the value is kept."""

logger = logging.getLogger(__name__)


def take_usual_priority() -> None:
    """Give all threads of this actor its raylet's niceness. Log a warning if the kernel does not allow it.

    Only root, or a process with a suitable RLIMIT_NICE, may lower its niceness.
    """
    usual = os.getpriority(os.PRIO_PROCESS, os.getppid())
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if niceness <= usual or NICENESS_VARIABLE in os.environ:
        return
    try:
        # On Linux the niceness belongs to a thread, and new threads inherit it.
        for thread in map(int, os.listdir("/proc/self/task")):
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, thread, usual)
    except PermissionError:
        logger.warning(
            "Ray starts this process at niceness %d, so other programs take its cores: start Ray's nodes with %s=0",
            niceness,
            NICENESS_VARIABLE,
        )
    else:
        logger.info("changed the niceness from %d, which Ray had set, to %d", niceness, usual)
