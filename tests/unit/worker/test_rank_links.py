"""Links between ranks: frames arrive whole, and an end that is closed, full or silent is noticed."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from blockyard.proto.security.peer_sockets import peer_contexts
from blockyard.worker.parallel import link as links
from blockyard.worker.parallel.link import Kind, Link, LinkClosed, accepted, connected
from blockyard.worker.parallel.watch import Watch

from .rank_links import END_SECONDS, SECRET


@pytest.fixture
def pair() -> Iterator[tuple[Link, Link]]:
    contexts = peer_contexts(None, secret=SECRET, cluster="c")
    assert contexts is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found: list[Link] = []
        thread = threading.Thread(target=lambda: found.append(accepted(listener.accept()[0], contexts)))
        thread.start()
        ours = connected("127.0.0.1", listener.getsockname()[1], contexts, END_SECONDS)
        thread.join(END_SECONDS)
    yield ours, found[0]
    ours.close()
    found[0].close()


def test_frames_of_any_size_arrive_whole_and_in_order(pair: tuple[Link, Link]) -> None:
    sizes = [0, 1, 4, 1000, 100_000, 3_000_000, 5]
    sender = threading.Thread(target=lambda: [pair[0].send(Kind.STEP, bytes([n % 251]) * n) for n in sizes])
    sender.start()
    for size in sizes:
        assert pair[1].expect(Kind.STEP, END_SECONDS).data == bytes([size % 251]) * size
    sender.join(END_SECONDS)


@pytest.mark.parametrize(
    "sent",
    [b"\x07\xff\xff\xff\xff", b"\x63\x00\x00\x00\x00", b"\x01\x01\x00\x00\x00{"],
    ids=["long", "kind", "json"],
)
def test_what_no_rank_sends_ends_the_link(pair: tuple[Link, Link], sent: bytes) -> None:
    pair[0]._socket.send(sent)
    with pytest.raises(LinkClosed):
        pair[1].expect(Kind.HELLO, END_SECONDS).json("code")


def test_a_send_to_an_end_that_takes_nothing_ends(
    pair: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "SEND_SECONDS", 0.2)
    begun = time.monotonic()
    with pytest.raises(LinkClosed, match="takes nothing"):
        pair[0].send(Kind.STEP, bytes(64 * 2**20))
    assert time.monotonic() - begun < END_SECONDS


def watch(link: Link, losses: list[str], longest_silence: float) -> Watch:
    watch = Watch(
        [link],
        on_frame=lambda index, frame: None,
        on_loss=lambda index, reason: losses.append(reason),
        longest_silence=lambda index: longest_silence,
    )
    watch.start()
    return watch


def test_a_link_that_is_closed_before_its_watch_runs_is_lost(pair: tuple[Link, Link]) -> None:
    losses: list[str] = []
    pair[0].close()
    thread = watch(pair[0], losses, 2.0)._thread
    thread.join(END_SECONDS)
    assert not thread.is_alive()
    assert losses == ["the connection is closed"]


def test_a_rank_that_is_silent_for_too_long_is_lost_and_one_that_sends_pulses_is_not(
    pair: tuple[Link, Link],
) -> None:
    losses: list[str] = []
    watches = [watch(link, losses, 1.2) for link in pair]
    time.sleep(1.6)
    assert not losses
    watches[1].stop()
    deadline = time.monotonic() + END_SECONDS
    while not losses and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [reason.startswith("it is silent for") for reason in losses] == [True]
