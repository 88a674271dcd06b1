"""Ranks that are processes get equal bits, and none outlasts another's death."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from blockyard.kernels.cpu.backend import CpuBackend
from blockyard.kernels.cpu.group import MessageRing, RankGroup, RankLost
from blockyard.kernels.cpu.library import CpuLibrary

from tests.unit.kernels import group_rank

WAIT_SECONDS = 120.0
GENEROUS_SECONDS = 10.0
"""Far above the milliseconds that a rank takes, and far below the deadline of a call."""


@pytest.fixture
def library(cpu_backend: CpuBackend) -> CpuLibrary:
    return cpu_backend.library


@pytest.fixture
def own() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Ranks:
    """Rank processes of one group, and this process's mapping of its memory as rank 0."""

    def __init__(self, library: CpuLibrary, case: str, size: int, own: ExitStack) -> None:
        self.group = RankGroup(lambda: library, rank=0, size=size)
        self.ring = MessageRing(lambda: library, rank=0, size=size)
        own.callback(self.group.memory.unlink)
        own.callback(self.ring.memory.unlink)
        name = f"{self.group.memory.name},{self.ring.memory.name}"
        first = 0 if case == "sums" else 1
        self.processes = [
            own.enter_context(
                subprocess.Popen(
                    [sys.executable, group_rank.__file__, case, str(size), str(rank), name],
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(first, size)
        ]
        for process in self.processes:
            own.callback(process.kill)
        for process in self.processes:
            assert self.line(process) == "ready"

    def line(self, process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_get_equal_bits_in_every_size_and_type(
    library: CpuLibrary, own: ExitStack, size: int
) -> None:
    ranks = Ranks(library, "sums", size, own)
    digests = {ranks.line(process) for process in ranks.processes}
    assert [process.wait(WAIT_SECONDS) for process in ranks.processes] == [0] * size
    assert len(digests) == 1


def test_a_killed_rank_ends_all_others_as_soon_as_its_death_is_told(
    library: CpuLibrary, own: ExitStack
) -> None:
    ranks = Ranks(library, "for-ever", 3, own)
    errors: list[RankLost] = []
    x = torch.ones(100)

    def add() -> None:
        try:
            while True:
                ranks.group.all_reduce(x.fill_(1.0))
        except RankLost as error:
            errors.append(error)

    adding = threading.Thread(target=add)
    adding.start()
    survivor, victim = ranks.processes
    victim.send_signal(signal.SIGKILL)
    victim.wait(GENEROUS_SECONDS)
    told = time.monotonic()
    ranks.group.abort()
    adding.join(GENEROUS_SECONDS)
    assert not adding.is_alive()
    assert [str(error) for error in errors] == ["another rank has ended"]
    ended, _, why = ranks.line(survivor).partition(" ")
    assert why == "another rank has ended"
    assert float(ended) - told < GENEROUS_SECONDS
    with pytest.raises(RankLost):
        ranks.group.all_reduce(x)


def test_a_ring_does_not_end_with_its_first_million_of_messages(library: CpuLibrary, own: ExitStack) -> None:
    ring = MessageRing(lambda: library, rank=0, size=1)
    own.callback(ring.memory.unlink)
    message = memoryview(bytearray(b"step"))
    for _ in range((1 << 20) + 3):
        ring.send(message)
