"""Engines whose model is divided among ranks, which are threads of the test's process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from queue import SimpleQueue
from threading import Event, Thread

import numpy as np
import torch
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine import Engine
from blockyard.worker.parallel.collective import Collective
from blockyard.worker.parallel.follower import Follower
from blockyard.worker.parallel.ranks import ALONE, Ranks
from blockyard.worker.parallel.step_arrays import StepArrays
from blockyard.worker.startup.loading import load_engine, load_follower

from .in_process_ranks import in_process

WAIT_SECONDS = 60.0


class Inbox:
    """Implements `Leader` for a rank in a thread: what rank 0 has for it, and what it answers."""

    def __init__(self) -> None:
        self.steps = SimpleQueue[StepArrays | None]()
        self.pools = SimpleQueue[tuple[int, int]]()
        self.budgets = SimpleQueue[int]()
        self.is_ready = Event()
        self.follower: Follower

    def pool_sizes(self) -> tuple[int, int]:
        return self.pools.get(timeout=WAIT_SECONDS)

    def has_loaded(self) -> None:
        pass

    def next_step(self) -> StepArrays:
        arrays = self.steps.get(timeout=WAIT_SECONDS)
        assert arrays is not None, "rank 0 has ended"
        return arrays

    def has_measured(self, budget_bytes: int) -> None:
        self.budgets.put(budget_bytes)


class ThreadRanks:
    """Implements `Ranks` for ranks in threads."""

    def __init__(
        self, collective: Collective, inboxes: Sequence[Inbox], followers: list[Follower] | None
    ) -> None:
        self.collective = collective
        self._inboxes = inboxes
        self._followers = [] if followers is None else followers

    def lead(self, arrays: StepArrays) -> None:
        for inbox in self._inboxes:
            inbox.steps.put(_as_received(arrays))

    def budgets(self) -> list[int]:
        return [inbox.budgets.get(timeout=WAIT_SECONDS) for inbox in self._inboxes]

    @contextmanager
    def allocating(self, num_blocks: int, num_host_slots: int) -> Iterator[None]:
        for inbox in self._inboxes:
            inbox.pools.put((num_blocks, num_host_slots))
        yield
        for inbox in self._inboxes:
            assert inbox.is_ready.wait(WAIT_SECONDS)
            self._followers.append(inbox.follower)


@contextmanager
def ranks(config: EngineConfig, size: int, followers: list[Follower] | None = None) -> Iterator[Ranks]:
    """Yield the ranks as rank 0 sees them, each other in a thread. `followers` takes the other ranks once they have
    loaded."""
    if size == 1:
        yield ALONE
        return
    collectives = in_process(size)
    inboxes = [Inbox() for _ in collectives[1:]]

    def follow(collective: Collective, inbox: Inbox) -> None:
        torch.set_num_threads(1)
        inbox.follower = load_follower(config, collective, inbox)
        inbox.is_ready.set()
        while (arrays := inbox.steps.get()) is not None:
            inbox.follower.run(arrays)

    threads = [
        Thread(target=follow, args=pair, name=f"rank {pair[0].rank}", daemon=True)
        for pair in zip(collectives[1:], inboxes, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        yield ThreadRanks(collectives[0], inboxes, followers)
    finally:
        for inbox in inboxes:
            inbox.steps.put(None)
        for thread in threads:
            thread.join(timeout=WAIT_SECONDS)
            assert not thread.is_alive()


@contextmanager
def divided_engine(
    config: EngineConfig, size: int, followers: list[Follower] | None = None
) -> Iterator[Engine]:
    """Yield the engine of rank 0."""
    with ranks(config, size, followers) as group:
        yield load_engine(config, group).engine


def _as_received(arrays: StepArrays) -> StepArrays:
    """Return the arrays as another process gets them: in int32, with memory of their own."""
    return StepArrays(
        **{field.name: getattr(arrays, field.name).astype(np.int32) for field in fields(arrays)}
    )
