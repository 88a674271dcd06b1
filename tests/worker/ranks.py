"""An engine whose model is divided among ranks, which are threads of the test's process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from queue import SimpleQueue
from threading import Thread

import numpy as np
import torch
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine import Engine
from blockyard.worker.parallel.collective import Collective
from blockyard.worker.parallel.follower import Follower
from blockyard.worker.parallel.in_process import in_process
from blockyard.worker.parallel.step_arrays import StepArrays
from blockyard.worker.startup.loading import ALONE, Ranks, load_engine, load_follower


class Threads:
    """Followers, each in a thread that computes what is sent to it."""

    def __init__(self, config: EngineConfig, size: int) -> None:
        self.collectives = in_process(size)
        self.followers = [load_follower(config, collective) for collective in self.collectives[1:]]
        self._inboxes = [SimpleQueue[StepArrays | None]() for _ in self.followers]
        self._threads = [
            Thread(target=_follow, args=pair, daemon=True)
            for pair in zip(self.followers, self._inboxes, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def lead(self, arrays: StepArrays | None) -> None:
        """Send a copy to each follower, as a process would get it. None ends them."""
        for inbox in self._inboxes:
            inbox.put(None if arrays is None else as_sent(arrays))

    def stop(self) -> None:
        self.lead(None)
        for thread in self._threads:
            thread.join(timeout=60)
            assert not thread.is_alive()


def _follow(follower: Follower, inbox: "SimpleQueue[StepArrays | None]") -> None:
    torch.set_num_threads(1)
    while (arrays := inbox.get()) is not None:
        follower.run(arrays)


def as_sent(arrays: StepArrays) -> StepArrays:
    """Return the arrays as int32 with memory of their own."""
    return StepArrays(
        **{field.name: getattr(arrays, field.name).astype(np.int32) for field in fields(arrays)}
    )


@contextmanager
def divided_engine(config: EngineConfig, size: int) -> Iterator[Engine]:
    """Yield the engine of rank 0. With one rank, nothing else runs."""
    if size == 1:
        yield load_engine(config, ALONE).engine
        return
    threads = Threads(config, size)
    collective: Collective = threads.collectives[0]
    try:
        yield load_engine(config, Ranks(collective=collective, lead=threads.lead)).engine
    finally:
        threads.stop()
