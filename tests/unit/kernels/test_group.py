"""Ranks add, gather and broadcast with equal bits in all of them, and none waits for another without end.

The ranks are threads here, and processes in tests/nightly/kernels/test_group.py.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from blockyard.kernels.cpu.backend import CpuBackend
from blockyard.kernels.cpu.group import MessageRing, RankGroup, RankLost, SharedMemory
from blockyard.kernels.cpu.library import CpuLibrary
from blockyard.kernels.cpu.recording import Arena

from .group_rank import COUNTS, check_rank

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


def pair(library: CpuLibrary, own: ExitStack) -> list[RankGroup]:
    """Return both ranks of a group, which meet in memory of this process."""
    first = RankGroup(lambda: library, rank=0, size=2)
    own.callback(first.memory.unlink)
    return [first, RankGroup(lambda: library, rank=1, size=2, name=first.memory.name)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_get_equal_bits_in_every_size_and_type(
    library: CpuLibrary, own: ExitStack, size: int
) -> None:
    first, ring = (kind(lambda: library, rank=0, size=size) for kind in (RankGroup, MessageRing))
    own.callback(first.memory.unlink)
    own.callback(ring.memory.unlink)
    with ThreadPoolExecutor(size) as pool:
        names = first.memory.name, ring.memory.name
        results = [pool.submit(check_rank, library, rank, size, names, COUNTS[:6]) for rank in range(size)]
        digests = {result.result(WAIT_SECONDS) for result in results}
    assert len(digests) == 1


def test_a_rank_that_does_not_come_is_given_up_at_the_deadline(library: CpuLibrary, own: ExitStack) -> None:
    group = RankGroup(lambda: library, rank=0, size=2, deadline_seconds=0.05)
    own.callback(group.memory.unlink)
    with pytest.raises(RankLost, match=r"does not answer within 0\.05 s"):
        group.all_reduce(torch.ones(3))


def test_ranks_that_compute_other_things_are_told(library: CpuLibrary, own: ExitStack) -> None:
    groups = pair(library, own)
    other = threading.Thread(target=lambda: groups[1].gather(torch.ones(1, 5)))
    other.start()
    with pytest.raises(RankLost, match="computes something else"):
        groups[0].gather(torch.ones(1, 6))
    other.join(GENEROUS_SECONDS)
    assert not other.is_alive()


def test_ranks_that_left_a_failed_step_at_different_calls_meet_in_the_next_one(
    library: CpuLibrary, own: ExitStack
) -> None:
    groups = pair(library, own)
    results: dict[tuple[int, int], object] = {}

    def run(group: RankGroup) -> None:
        for step in range(1, 40):
            x = torch.ones(1000)
            try:
                with group.step(step):
                    for call in range(5):
                        if step % 3 == 0 and group.rank == step % 2 and call == step % 5:
                            raise ValueError("a defect of one rank")
                        group.all_reduce(x)
                results[group.rank, step] = float(x[0])
            except (RankLost, ValueError) as error:
                results[group.rank, step] = str(error)

    threads = [threading.Thread(target=run, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert len(results) == 2 * 39
    for (rank, step), result in results.items():
        failing = "a defect of one rank" if rank == step % 2 else "another rank has failed"
        assert result == (32.0 if step % 3 else failing), (rank, step)


def test_a_rank_that_ran_ahead_and_failed_there_has_done_its_part_of_this_step(
    library: CpuLibrary, own: ExitStack
) -> None:
    groups = pair(library, own)
    received = torch.zeros(3)
    with groups[1].step(1):
        with groups[0].step(1):
            groups[0].broadcast(torch.ones(3))
        for step in (2, 3):
            with pytest.raises(ValueError, match="a defect"), groups[0].step(step):
                raise ValueError("a defect")
        groups[1].broadcast(received)
    assert received.tolist() == [1, 1, 1]
    for step in (2, 3):
        with pytest.raises(RankLost, match="another rank has failed"), groups[1].step(step):
            groups[1].broadcast(received)


def test_an_idle_receiver_waits_without_a_deadline_until_the_group_is_aborted(
    library: CpuLibrary, own: ExitStack
) -> None:
    sender = MessageRing(lambda: library, rank=0, size=2)
    own.callback(sender.memory.unlink)
    receiver = MessageRing(lambda: library, rank=1, size=2, name=sender.memory.name)
    ends: list[object] = []

    def receive() -> None:
        try:
            while True:
                ends.append(receiver.receive())
        except RankLost as error:
            ends.append(str(error))

    thread = threading.Thread(target=receive)
    thread.start()
    sender.send(memoryview(bytearray(b"step 1")))
    while not ends:
        time.sleep(0.001)
    sender.abort()
    thread.join(GENEROUS_SECONDS)
    assert ends == [b"step 1", "another rank has ended"]


def test_a_recorded_sum_is_added_at_each_replay_and_tells_of_a_lost_rank(
    library: CpuLibrary, own: ExitStack
) -> None:
    backend = CpuBackend(library)
    group = RankGroup(lambda: backend.library, rank=0, size=1)
    own.callback(group.memory.unlink)
    x_TH, weight_H = torch.randn(2, 64), torch.randn(64)

    def compute() -> torch.Tensor:
        out_TH = torch.empty_like(x_TH)
        backend.rms_norm(x_TH, weight_H, 1e-6, out_TH=out_TH)
        group.all_reduce(out_TH)
        return out_TH

    with torch.inference_mode():
        recorded = backend.record(compute, Arena())
        x_TH.copy_(torch.randn(2, 64))
        assert torch.equal(recorded.replay(), compute())
        group.abort()
        x_TH.zero_()
        recorded.replay()
    with pytest.raises(RankLost):
        group.check()


def test_no_other_user_may_open_the_memory_and_it_has_no_name_once_unlinked() -> None:
    memory = SharedMemory.create(4096)
    path = Path("/dev/shm") / memory.name
    assert path.stat().st_mode & 0o777 == 0o600
    again = SharedMemory.open(memory.name, 4096)
    memory.unlink()
    assert not path.exists()
    assert again.address != memory.address
    with pytest.raises(FileNotFoundError):
        SharedMemory.open(memory.name, 4096)
    with pytest.raises(ValueError, match="no name"):
        SharedMemory.open("../etc/passwd", 4096)
