"""How the processes of a cluster log: one format, on stderr, at the level that BLOCKYARD_LOG_LEVEL says.

At no level may a line hold what a client sent, but for names: tests/security/test_canary.py.
"""

import logging
import os

LEVEL_VARIABLE = "BLOCKYARD_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")


def configure_logging() -> None:
    """Raises ValueError for a level that there is not."""
    level = os.environ.get(LEVEL_VARIABLE, "info").lower()
    if level not in LEVELS:
        raise ValueError(f"{LEVEL_VARIABLE} must be one of {', '.join(LEVELS)}, not {level!r}")
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
