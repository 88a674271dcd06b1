"""Engines whose model is divided among ranks, which are threads of the test's process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from queue import SimpleQueue
from threading import Thread

import numpy as np
import torch
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine import Engine
from blockyard.worker.parallel.follower import Follower
from blockyard.worker.parallel.step_arrays import StepArrays
from blockyard.worker.startup.loading import ALONE, Ranks, load_engine, load_follower

from .in_process_ranks import in_process


@contextmanager
def ranks(config: EngineConfig, size: int, followers: list[Follower] | None = None) -> Iterator[Ranks]:
    """Yield the ranks as rank 0 sees them, each other in a thread. `followers` takes the other ranks."""
    if size == 1:
        yield ALONE
        return
    collectives = in_process(size)
    inboxes = [SimpleQueue[StepArrays | None]() for _ in collectives[1:]]
    others = [load_follower(config, collective) for collective in collectives[1:]]
    threads = [Thread(target=_follow, args=pair, daemon=True) for pair in zip(others, inboxes, strict=True)]
    if followers is not None:
        followers += others

    def lead(arrays: StepArrays) -> None:
        for inbox in inboxes:
            inbox.put(_as_received(arrays))

    for thread in threads:
        thread.start()
    try:
        yield Ranks(collective=collectives[0], lead=lead)
    finally:
        for inbox in inboxes:
            inbox.put(None)
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive()


@contextmanager
def divided_engine(
    config: EngineConfig, size: int, followers: list[Follower] | None = None
) -> Iterator[Engine]:
    """Yield the engine of rank 0."""
    with ranks(config, size, followers) as group:
        yield load_engine(config, group).engine


def _follow(follower: Follower, inbox: "SimpleQueue[StepArrays | None]") -> None:
    torch.set_num_threads(1)
    while (arrays := inbox.get()) is not None:
        follower.run(arrays)


def _as_received(arrays: StepArrays) -> StepArrays:
    """Return the arrays as another process gets them: in int32, with memory of their own."""
    return StepArrays(
        **{field.name: getattr(arrays, field.name).astype(np.int32) for field in fields(arrays)}
    )
