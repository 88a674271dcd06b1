"""A block arrives as it was sent, however many pieces it has and however little the socket takes at once."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from blockyard.worker.transfer.wire import MAX_TRIAL_BLOCKS, TRIAL_BYTES, Connection, Cut, Late, trial_blocks
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples


@contextmanager
def connected(seconds: float = 20.0) -> Iterator[tuple[Connection, Connection]]:
    """Yield both ends of a connection."""
    one, other = socket.socketpair()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel takes its least, some kilobytes
    ends = Connection(one), Connection(other)
    for end in ends:
        end.deadline = time.monotonic() + seconds
    yield ends
    for end in ends:
        end.close()


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=20), st.sampled_from([1, 7, 100]))
@examples(50, deadline=None)
def test_a_block_arrives_as_it_was_sent(lengths: list[int], copies: int) -> None:
    """Up to 2,000 pieces, some of them empty."""
    sizes = [length // copies for length in lengths] * copies
    pieces = [memoryview(bytes([number % 251]) * size) for number, size in enumerate(sizes)]
    with connected() as (sender, receiver):
        sending = threading.Thread(target=sender.send_block, args=(3, pieces))
        sending.start()
        into = bytearray(sum(sizes))
        receiver.receive_block(3, memoryview(into))
        sending.join()
        assert into == b"".join(pieces)


@pytest.mark.parametrize(("is_closed", "end"), [(False, Late), (True, Cut)])
def test_a_block_that_nobody_takes_ends_with_its_time_or_with_the_connection(
    is_closed: bool, end: type[Exception]
) -> None:
    with connected(seconds=20.0 if is_closed else 0.2) as (sender, receiver):
        if is_closed:
            receiver.close()
        with pytest.raises(end):
            sender.send_block(0, [memoryview(bytes(1 << 20))] * 10)


@given(st.integers(1, 1 << 32), st.integers(1, 1 << 30))
def test_a_trial_is_at_least_one_block_and_bounded(num_bytes: int, block_bytes: int) -> None:
    count = trial_blocks(num_bytes, block_bytes)
    assert 1 <= count <= MAX_TRIAL_BLOCKS
    assert (count - 1) * block_bytes < min(num_bytes, TRIAL_BYTES)
