"""Deadlines of commands: a time budget, and ways to abandon a step that waits for a silent cluster.

Owns the budget, which all steps of a command share. A thread ends a command that waits in Python. Calls of Ray need a
child process, because Ray waits in C++ code and holds the GIL. No other thread of that process runs meanwhile.
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
"""Longest time from the start of a command's process to its answer. Python's shutdown takes the rest of ten seconds."""
MAX_START_SECONDS = 4.0
"""Limit on the start-up time that the budget subtracts. A sound cluster needs time, even where Python starts slowly."""
SAY_SECONDS = 0.5
"""Part of the budget that each step leaves for reporting that it had no answer."""
MIN_STEP_SECONDS = 1.0
"""Least time of a step, however little of the budget is left. A sound cluster on a busy machine needs it."""
END_SECONDS = 0.5
"""Time in which a child that has answered may disconnect from Ray before it is killed."""
_FORK = multiprocessing.get_context("fork")


class Budget:
    """Time budget of one command, from the start of its process."""

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
        """Return the time limit of the next step, `most_seconds` or less.

        It is at least MIN_STEP_SECONDS, so that no call starts past its deadline.
        """
        return max(MIN_STEP_SECONDS, min(most_seconds, self.left_seconds - SAY_SECONDS))


def _age_seconds() -> float:
    process = identify(os.getpid())
    assert process is not None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_ticks / os.sysconf("SC_CLK_TCK")


class Child:
    """A forked process that runs `look` at once. `look` gets a function, to which it passes its answer.

    If `look` raises RuntimeError, ValueError, OSError or ModuleNotFoundError, `answer` raises it here. Create a Child
    before this process imports Ray or starts a thread, because a fork copies no threads.
    """

    def __init__(self, look: Callable[[Callable[[Any], None]], None]) -> None:
        self._answers, sending = _FORK.Pipe(duplex=False)
        self._process = _FORK.Process(target=_look, args=(look, sending), daemon=True)
        self._process.start()
        sending.close()

    def answer(self, seconds: float, sentence: str) -> Any:
        """Return the child's answer, and kill the child.

        Raise TimeoutError with `sentence` if no answer comes within `seconds` or the child dies.
        """
        try:
            if not self._answers.poll(seconds):
                raise TimeoutError(sentence)
            sent = self._answers.recv()
            self._process.join(END_SECONDS)
        except EOFError:
            self._process.join(END_SECONDS)
            code = self._process.exitcode
            raise TimeoutError(f"{sentence} (the process that asked has ended with code {code})") from None
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
    """Call `give_up` with `sentence` if the block takes longer than `seconds`.

    By default the process then prints the sentence on stderr and exits with code 1.
    """
    timer = threading.Timer(seconds, give_up, (sentence,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
