"""Ends a command that waits for a cluster that does not answer.

Owns the time and the way out. It is a thread of its own because Ray waits in C++ code, where no exception of Python
arrives.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator

ANSWER_SECONDS = 8.5
"""With the start of Python and the import of Ray some ten seconds pass until a command has answered."""


def _say_and_exit(sentence: str) -> None:
    print(f"Error: {sentence}", file=sys.stderr, flush=True)
    os._exit(1)


@contextlib.contextmanager
def answers_within(
    seconds: float, sentence: str, *, give_up: Callable[[str], None] = _say_and_exit
) -> Iterator[None]:
    """What runs inside has so long. Then the process says the sentence on stderr and ends with exit code 1."""
    timer = threading.Timer(seconds, give_up, (sentence,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
