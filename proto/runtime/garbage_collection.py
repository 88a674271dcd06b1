"""What keeps Python's garbage collector from holding up a process that serves: a router's event loop, a worker's steps.

Owns the thresholds. Does not own when a process has loaded what it keeps.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

COLLECT_AFTER = (1500, 4, 200)
"""Objects made and not yet freed before the collector walks the young ones, such walks before one of the middle
generation, and those before one of everything (700, 10, 10 by default). On a busy machine a walk over 10,000 young ones
took 5 ms, and 5 to 18 where most of them were garbage."""


@contextmanager
def spared_by_garbage_collection() -> Iterator[None]:
    """For the life of a process that has loaded what it keeps: the garbage collector leaves all of that alone, a walk
    of 600 ms with transformers in memory, and looks at what is new in small portions."""
    gc.collect()
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    try:
        yield
    finally:
        # Libraries in C++ complain at exit of what is never freed.
        gc.unfreeze()
        gc.set_threshold(*thresholds)
