"""The time that a command has to answer, and the end of one that waits for a cluster that does not.

Owns the budget, which all steps of a command share, and the ways out. For what waits in Python that is a thread, for
Ray a process: it waits in C++ code and holds Python's lock meanwhile, so that no thread of its process runs.
"""

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from blockyard.deploy.machine.processes import identify

ANSWER_SECONDS = 8.5
"""From the start of its process until a command has answered. The end of Python takes the rest of ten seconds."""
MAX_START_SECONDS = 4.0
"""No more is counted of the start: where Python takes longer a sound cluster still has time to answer."""
SAY_SECONDS = 0.5
"""Each step leaves so much of the budget to say that it had no answer."""
MIN_STEP_SECONDS = 1.0
"""However little is left: a sound cluster on a busy machine needs it."""
END_SECONDS = 0.5
"""A child that has answered has so long to leave Ray in good order."""
_FORK = multiprocessing.get_context("fork")


class Budget:
    """The time of one command, from its process's start on."""

    def __init__(self, age_seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_at = clock() + ANSWER_SECONDS - min(max(age_seconds, 0.0), MAX_START_SECONDS)

    @classmethod
    def of_this_process(cls) -> "Budget":
        return cls(_age_seconds())

    @property
    def left_seconds(self) -> float:
        return max(0.0, self._ends_at - self._clock())

    def step_seconds(self, most_seconds: float = ANSWER_SECONDS) -> float:
        """Tells what the next step may take. It is never 0: no call has a deadline that has passed."""
        return max(MIN_STEP_SECONDS, min(most_seconds, self.left_seconds - SAY_SECONDS))


def _age_seconds() -> float:
    process = identify(os.getpid())
    assert process is not None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_ticks / os.sysconf("SC_CLK_TCK")


class Child:
    """A process that looks for this one, beginning now. `look` is given a function that sends its answer; what it
    raises `answer` raises. To be made before this process imports Ray or starts a thread: a fork copies no threads."""

    def __init__(self, look: Callable[[Callable[[Any], None]], None]) -> None:
        self._answers, sending = _FORK.Pipe(duplex=False)
        self._process = _FORK.Process(target=_look, args=(look, sending), daemon=True)
        self._process.start()
        sending.close()

    def answer(self, seconds: float, sentence: str) -> Any:
        """Raises TimeoutError with the sentence where none came within so long, or where the child has died."""
        try:
            if not self._answers.poll(seconds):
                raise TimeoutError(sentence)
            sent = self._answers.recv()
            self._process.join(END_SECONDS)
        except EOFError:
            raise TimeoutError(sentence) from None
        finally:
            self._process.kill()
            self._process.join()
        if isinstance(sent, Exception):
            raise sent
        return sent


def _look(look: Callable[[Callable[[Any], None]], None], sending: Connection) -> None:
    try:
        look(sending.send)
    except (RuntimeError, ValueError, OSError, ModuleNotFoundError) as error:
        sending.send(error)


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
