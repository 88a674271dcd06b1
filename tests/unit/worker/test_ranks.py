"""Ranks come together by a secret, keep their numbers, tell each other steps, and notice the end of another."""

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from typing import Any

import hypothesis.extra.numpy as arrays_of
import numpy as np
import pytest
import torch.distributed as dist
from blockyard.kernels.cpu.extension import load_extension
from blockyard.worker.config import EngineConfig
from blockyard.worker.parallel.collective import RanksLost
from blockyard.worker.parallel.exchange import Exchange
from blockyard.worker.parallel.link import Kind, Link, LinkClosed
from blockyard.worker.parallel.messages import pack, unpack
from blockyard.worker.parallel.step_arrays import StepArrays
from blockyard.worker.parallel.torch_collective import GlooCollective
from blockyard.worker.ranks import RankLeader, run_rank
from hypothesis import given
from hypothesis import strategies as st

from .rank_links import DEMO, END_SECONDS, SECRET, connect_with, joined, leader, settings

int32s = st.integers(-(2**31), 2**31 - 1)


@st.composite
def steps(draw: st.DrawFn) -> StepArrays:
    shapes = {
        field.name: draw(st.tuples(*[st.integers(0, 5)] * getattr(StepArrays(), field.name).ndim))
        for field in fields(StepArrays)
    }
    dtypes = st.sampled_from([np.int32, np.int64])
    return StepArrays(
        **{
            name: draw(arrays_of.arrays(draw(dtypes), shape, elements=int32s))
            for name, shape in shapes.items()
        }
    )


@given(steps())
def test_a_step_is_the_same_after_its_message(step: StepArrays) -> None:
    received = unpack(pack(step).tobytes())
    for field in fields(StepArrays):
        sent, got = getattr(step, field.name), getattr(received, field.name)
        assert got.shape == sent.shape, field.name
        assert (got == sent).all(), field.name


@given(steps(), st.data())
def test_a_message_that_is_cut_or_changed_in_its_sizes_is_refused(
    step: StepArrays, data: st.DataObject
) -> None:
    message = pack(step)
    with pytest.raises(ValueError, match="message of a step"):
        unpack(message.tobytes()[: data.draw(st.integers(0, 4 * len(message) - 1))])
    with pytest.raises(ValueError, match="message of a step"):
        unpack(message.tobytes() + b"\0\0\0\0")
    message[0] += 1
    with pytest.raises(ValueError, match="message of a step"):
        unpack(message.tobytes())


@pytest.mark.parametrize("has_kernels", [True, False])
def test_ranks_of_which_one_lacks_the_kernels_share_no_memory(has_kernels: bool) -> None:
    """On GPUs they are not needed. Then steps take the connections."""
    config = EngineConfig(model=str(DEMO), **settings(tensor_parallel_size=2))
    library = load_extension() if has_kernels else None
    exchange = Exchange(config, library, rank=1, size=2, tell=lambda key, value: None)
    name = f"blockyard-{'0' * 32}"
    assert not exchange.map_memory([None, None] if has_kernels else [name, None])
    assert exchange.ring is None


def test_a_rank_without_the_secret_is_refused_and_one_with_it_joins_after_it() -> None:
    own = leader()
    errors: list[Exception] = []

    def intrude() -> None:
        try:
            run_rank(1, own.address, "another secret", "c")
        except Exception as error:
            errors.append(error)
        with socket.create_connection(("127.0.0.1", int(own.address.rpartition(":")[2]))) as plain:
            plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
        run_rank(1, own.address, SECRET, "c")

    thread = threading.Thread(target=intrude)
    thread.start()
    own.connect(END_SECONDS)
    own.close()
    thread.join(END_SECONDS)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [LinkClosed]


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_ranks_keep_their_numbers_in_whatever_order_they_come(lost: int) -> None:
    own, order = leader(4), [3, 1, 2]
    links = connect_with(own, *order)
    links[order.index(lost)].close()
    until(lambda: own.lost)
    assert own.lost is not None
    assert own.lost.startswith(f"rank {lost} is lost")
    own.close()


@pytest.mark.parametrize("number", [1, 0, 3, "1", None])
def test_a_rank_whose_number_is_not_due_is_refused_and_the_others_come(number: Any) -> None:
    own = leader(3)
    refused: list[bool] = []

    def come() -> None:
        first = joined(own, 1)
        first.expect(Kind.START, END_SECONDS)
        try:
            joined(own, number).expect(Kind.START, END_SECONDS)
        except LinkClosed:
            refused.append(True)
        for link in (first, joined(own, 2)):
            if link is not first:
                link.expect(Kind.START, END_SECONDS)
            link.send_json(Kind.MAPPED, is_mapped=True)

    thread = threading.Thread(target=come)
    thread.start()
    own.connect(END_SECONDS)
    thread.join(END_SECONDS)
    assert refused == [True]
    own.close()


def test_rank_0_waits_until_all_ranks_have_their_pools() -> None:
    own = leader(3)
    links = connect_with(own, 1, 2)
    had_pools: list[int] = []

    def allocate(link: Link) -> None:
        had_pools.append(link.expect(Kind.POOLS, END_SECONDS).json("num_blocks"))
        time.sleep(0.2)
        had_pools.append(0)
        link.send(Kind.READY)

    threads = [threading.Thread(target=allocate, args=(link,)) for link in links]
    for thread in threads:
        thread.start()
    with own.allocating(10, 2):
        pass
    assert sorted(had_pools) == [0, 0, 10, 10]
    own.close()


def test_a_rank_without_memory_for_its_pool_fails_the_load_in_words() -> None:
    own = leader(2)
    (link,) = connect_with(own, 1)
    with pytest.raises(RanksLost, match="rank 1: it has no memory"), own.allocating(10, 2):
        link.send_json(Kind.FAILED, reason="it has no memory")
    own.close()


def test_without_a_secret_ranks_meet_on_loopback_alone() -> None:
    config = EngineConfig(model=str(DEMO), **settings(tensor_parallel_size=2))
    with pytest.raises(ValueError, match="need a cluster secret"):
        RankLeader(config, secret="", cluster="c", host="10.0.0.1")


def test_ranks_that_do_not_come_are_told_of() -> None:
    with pytest.raises(ValueError, match="1 of 2 ranks have come"):
        leader().connect(0.3)


def test_a_rank_notices_the_end_of_rank_0_without_its_goodbye() -> None:
    own = leader()
    errors: list[Exception] = []

    def join() -> None:
        try:
            run_rank(1, own.address, SECRET, "c")
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    own.connect(END_SECONDS)
    for one in own._links.values():
        one.close()
    thread.join(END_SECONDS)
    assert [type(error) for error in errors] == [RanksLost]
    own.close()


class LateWork(dist.Work):
    """An operation that ends right after a wait for it has timed out."""

    def __init__(self, failure: str | None) -> None:
        super().__init__()
        self._failure = failure
        self._has_ended = False

    def is_completed(self) -> bool:
        return self._has_ended

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._has_ended:
            self._has_ended = True
            raise RuntimeError("Operation timed out!")
        if self._failure is not None:
            raise RuntimeError(self._failure)
        return True


def test_an_operation_that_ends_as_a_wait_for_it_times_out_counts_as_it_ended() -> None:
    ranks = GlooCollective(None, rank=0, size=2)
    ranks._wait(LateWork(None))
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        ranks._wait(LateWork("connection closed by peer"))
