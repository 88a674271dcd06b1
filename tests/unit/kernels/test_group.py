"""Ranks that are processes add, gather and broadcast with equal bits in all of them, and none outlasts another's
death."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest
import torch
from blockyard.kernels.cpu.backend import CpuBackend
from blockyard.kernels.cpu.group import MessageRing, RankGroup, RankLost, SharedMemory
from blockyard.kernels.cpu.library import CpuLibrary
from blockyard.kernels.cpu.recording import Arena
from blockyard.kernels.interface import Backend

PROGRAM = Path(__file__).with_name("group_rank.py")
WAIT_SECONDS = 120.0
GENEROUS_SECONDS = 10.0
"""Far above the milliseconds that a rank takes, and far below the deadline of a call."""


@pytest.fixture
def library(cpu_backend: Backend) -> CpuLibrary:
    return cast(CpuBackend, cpu_backend).library


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
                    [sys.executable, str(PROGRAM), case, str(size), str(rank), name],
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


@pytest.fixture
def own() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.ci
@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_get_equal_bits_in_every_size_and_type(
    library: CpuLibrary, own: ExitStack, size: int
) -> None:
    ranks = Ranks(library, "sums", size, own)
    digests = {ranks.line(process) for process in ranks.processes}
    assert [process.wait(WAIT_SECONDS) for process in ranks.processes] == [0] * size
    assert len(digests) == 1
    (digest,) = digests
    assert digest[:64] == digest[64:], "the same sums again give the same bits"


@pytest.mark.ci
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


def test_a_rank_that_does_not_come_is_given_up_at_the_deadline(library: CpuLibrary, own: ExitStack) -> None:
    group = RankGroup(lambda: library, rank=0, size=2, deadline_seconds=0.05)
    own.callback(group.memory.unlink)
    with pytest.raises(RankLost, match=r"does not answer within 0\.05 s"):
        group.all_reduce(torch.ones(3))


def test_ranks_that_compute_other_things_are_told(library: CpuLibrary, own: ExitStack) -> None:
    groups = [RankGroup(lambda: library, rank=0, size=2)]
    own.callback(groups[0].memory.unlink)
    groups.append(RankGroup(lambda: library, rank=1, size=2, name=groups[0].memory.name))
    other = threading.Thread(target=lambda: groups[1].gather(torch.ones(1, 5)))
    other.start()
    with pytest.raises(RankLost, match="computes something else"):
        groups[0].gather(torch.ones(1, 6))
    other.join(GENEROUS_SECONDS)
    assert not other.is_alive()


def test_ranks_that_left_a_failed_step_at_different_calls_meet_in_the_next_one(
    library: CpuLibrary, own: ExitStack
) -> None:
    groups = [RankGroup(lambda: library, rank=0, size=2)]
    own.callback(groups[0].memory.unlink)
    groups.append(RankGroup(lambda: library, rank=1, size=2, name=groups[0].memory.name))
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
    groups = [RankGroup(lambda: library, rank=0, size=2)]
    own.callback(groups[0].memory.unlink)
    groups.append(RankGroup(lambda: library, rank=1, size=2, name=groups[0].memory.name))
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


@pytest.mark.ci
def test_a_ring_does_not_end_with_its_first_million_of_messages(library: CpuLibrary, own: ExitStack) -> None:
    ring = MessageRing(lambda: library, rank=0, size=1)
    own.callback(ring.memory.unlink)
    message = memoryview(bytearray(b"step"))
    for _ in range((1 << 20) + 3):
        ring.send(message)
