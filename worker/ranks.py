"""Ranks: the processes that share one model, and how rank 0 runs a step on all of them.

Rank 0 listens. Each other rank connects and tells its number, and both prove that they know the secret. Then rank 0
gives it the settings and the names of the shared memory. Ranks on several machines do without that memory. The
connection stays open, and both ends send pulses. So rank 0 notices within milliseconds that a rank has ended, and
within seconds that one is frozen or cut off. Either ends the worker.

    leader = RankLeader(config, secret=secret, cluster=cluster)
    leader.spawn()                               # or elsewhere: run_rank(1, leader.address, leader.secret, cluster)
    load_engine(config, leader.connect())

Owns connections. Does not own processes (parallel/processes.py), or what a rank computes (execution/part_runner.py).
"""

import contextlib
import logging
import math
import os
import queue
import secrets
import signal
import socket
import ssl
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from blockyard.kernels.cpu.group import MAX_RANKS, RankLost
from blockyard.proto.naming.code_version import code_version
from blockyard.proto.runtime.logs import configure_logging
from blockyard.proto.security.loopback import LOOPBACK, is_loopback, with_brackets, without_brackets
from blockyard.proto.security.peer_sockets import peer_contexts
from blockyard.worker.config import EngineConfig
from blockyard.worker.parallel.collective import Collective, RanksLost
from blockyard.worker.parallel.exchange import Exchange, Names, kernels_for
from blockyard.worker.parallel.follower import Follower
from blockyard.worker.parallel.link import Frame, Kind, Link, LinkClosed, accepted, connected
from blockyard.worker.parallel.messages import pack, unpack
from blockyard.worker.parallel.processes import SECRET_VARIABLE, RankProcesses
from blockyard.worker.parallel.ranks import Ranks
from blockyard.worker.parallel.step_arrays import StepArrays
from blockyard.worker.parallel.watch import Watch
from blockyard.worker.startup.loading import load_follower

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 300.0
"""Longest wait until all ranks have come. Each imports PyTorch first."""
ANSWER_SECONDS = 60.0
POLL_SECONDS = 0.2
FROZEN_SECONDS = 2.0
"""Silence after which a rank that computes steps counts as frozen."""
LOADING_FROZEN_SECONDS = 60.0
"""The same while it loads: a slow disk may hold up its pulses."""
STOP_SECONDS = 5.0


class RankLeader:
    """Implements `Ranks`: rank 0's connections to all other ranks. Close it when the worker ends."""

    collective: Collective
    """Rank 0's place among the ranks, from `connect` on."""

    def __init__(self, config: EngineConfig, *, secret: str, cluster: str, host: str = LOOPBACK) -> None:
        """Listen at a free port of `host`, which is loopback or this node's private address.

        Raises ValueError where other machines could connect without a secret, and for an address that cannot be bound.
        """
        if config.tensor_parallel_size > MAX_RANKS:
            raise ValueError(f"tensor_parallel_size {config.tensor_parallel_size} is more than {MAX_RANKS}")
        if not secret and not is_loopback(host):
            raise ValueError(
                f"ranks at {host} need a cluster secret: without one they meet on loopback alone"
            )
        self.config, self.size = config, config.tensor_parallel_size
        self.secret = secret or secrets.token_hex(16)
        """The cluster's secret, or a random one if it has none. Every rank must know it."""
        self.cluster = cluster
        self.on_lost: Callable[[str], object] = lambda reason: None
        """Called once with the reason when a rank is lost after `connect`, on another thread."""
        self.lost: str | None = None
        """The reason why a rank is lost, or why this end is closed."""
        self._processes = RankProcesses()
        try:
            self._listener = socket.create_server((without_brackets(host), 0), family=_family(host))
        except OSError as error:
            raise ValueError(f"cannot listen for ranks on {host}: {error}") from error
        self._host = without_brackets(host)
        self.address = f"{with_brackets(host)}:{self._listener.getsockname()[1]}"
        self._links: dict[int, Link] = {}
        """Connections by the number of the rank."""
        self._watch: Watch | None = None
        self._exchange: Exchange
        self._answers: dict[Kind, dict[int, Frame]] = defaultdict(dict)
        """The latest frame of each kind that each rank has sent."""
        self._changed = threading.Condition()
        """Notified of each answer, and of a loss."""
        self._are_ready = False

    def spawn(self) -> None:
        """Start all other ranks as processes, which end with this one. Threads of the machine are divided among all."""
        self._processes.start(
            self.config, leader_address=self.address, secret=self.secret, cluster=self.cluster
        )

    def connect(self, seconds: float = CONNECT_SECONDS) -> Ranks:
        """Wait until all ranks have come, and return what rank 0 loads its engine with.

        Raises ValueError where they do not come in time, and RanksLost where one is lost again.
        """
        library = kernels_for(self.config)
        self._exchange = Exchange(self.config, library, rank=0, size=self.size, tell=self._tell)
        try:
            try:
                self._accept_all(self._exchange.make_memory(), time.monotonic() + seconds)
            finally:
                self._exchange.unlink_memory()
        except (LinkClosed, OSError) as error:
            self.close()
            raise ValueError(f"the ranks do not come together: {error}") from error
        except BaseException:
            self.close()
            raise
        ready = self._answers[Kind.READY]
        self._watch = Watch(
            [self._links[rank] for rank in range(1, self.size)],
            on_frame=lambda index, frame: self._take(index + 1, frame),
            on_loss=lambda index, reason: self._lose(f"rank {index + 1} is lost: {reason}"),
            longest_silence=lambda index: FROZEN_SECONDS if index + 1 in ready else LOADING_FROZEN_SECONDS,
        )
        self._watch.start()
        try:
            self.collective = self._exchange.meet(host=self._host, on_failure=self._lose)
        except RanksLost as error:
            raise RanksLost(self.lost or str(error)) from error
        return self

    def _accept_all(self, names: Names, deadline: float) -> None:
        context = _contexts(self.secret, self.cluster)
        self._listener.settimeout(POLL_SECONDS)
        while len(self._links) < self.size - 1:
            self._processes.check_all_run()
            if time.monotonic() > deadline:
                raise ValueError(f"{len(self._links) + 1} of {self.size} ranks have come in time")
            try:
                self._greet(accepted(self._listener.accept()[0], context), names)
            except TimeoutError:
                continue
            except LinkClosed as error:
                logger.warning("a connection is refused: %s", error)
                continue
        self._listener.close()
        links = self._links.values()
        mapped = [link.expect(Kind.MAPPED, ANSWER_SECONDS).json("is_mapped") for link in links]
        if not all(mapped):
            logger.warning(
                "not all ranks share memory: steps and sums pass through the network, and are slower"
            )
            self._exchange.leave_memory()
        for link in links:
            link.send_json(Kind.GO, share_memory=all(mapped))

    def _greet(self, link: Link, names: Names) -> None:
        """Check number and code of a rank, and give it the settings. Raises LinkClosed for a number that is taken, and
        ValueError for other code."""
        hello = link.expect(Kind.HELLO, ANSWER_SECONDS)
        rank, code = hello.json("rank"), hello.json("code")
        if code != code_version():
            link.close()
            raise ValueError(f"a rank has the code {code}, and this process {code_version()}")
        if rank not in range(1, self.size) or rank in self._links:
            link.close()
            raise LinkClosed(f"rank {rank} of {self.size} is not due")
        link.send_json(
            Kind.START,
            size=self.size,
            config=asdict(self.config),
            memory=names,
        )
        self._links[rank] = link

    def _take(self, rank: int, frame: Frame) -> None:
        if frame.kind is Kind.FAILED:
            self._lose(f"rank {rank}: {frame.json('reason')}")
        elif frame.kind is Kind.STORE:
            self._exchange.store.put(frame.json("key"), bytes.fromhex(frame.json("value")))
            for other, link in self._links.items():
                if other != rank:
                    with contextlib.suppress(LinkClosed):  # It is noticed at that link.
                        link.send(Kind.STORE, frame.data)
        else:
            with self._changed:
                self._answers[frame.kind][rank] = frame
                self._changed.notify_all()

    def _tell(self, key: str, value: bytes) -> None:
        for link in self._links.values():
            link.send_json(Kind.STORE, key=key, value=value.hex())

    def _lose(self, reason: str) -> None:
        if self.lost is None:
            self._set_lost(reason)
            logger.critical("%s", reason)
            self._end_ranks()
            self.on_lost(reason)

    def _set_lost(self, reason: str) -> None:
        with self._changed:
            self.lost = self.lost or reason
            self._changed.notify_all()

    def _answers_of_all(self, kind: Kind) -> list[Frame]:
        """Wait for a frame of this kind from each other rank. A rank that works on it may take any time, because it
        sends pulses. Raises RanksLost."""
        answers = self._answers[kind]
        with self._changed:
            self._changed.wait_for(lambda: self.lost is not None or len(answers) == self.size - 1)
        if self.lost is not None:
            raise RanksLost(self.lost)
        return [answers[rank] for rank in range(1, self.size)]

    def budgets(self) -> list[int]:
        return [int(frame.json("budget_bytes")) for frame in self._answers_of_all(Kind.MEASURED)]

    @contextmanager
    def allocating(self, num_blocks: int, num_host_slots: int) -> Iterator[None]:
        for link in self._links.values():
            try:
                link.send_json(Kind.POOLS, num_blocks=num_blocks, num_host_slots=num_host_slots)
            except LinkClosed as error:
                raise RanksLost(self.lost or str(error)) from error
        yield
        self._answers_of_all(Kind.READY)
        self._are_ready = True

    def lead(self, arrays: StepArrays) -> None:
        if not self._are_ready:
            self._answers_of_all(Kind.LOADED)
        try:
            message = pack(arrays)
            if self._exchange.ring is not None:
                self._exchange.ring.send(message.data)
            else:
                for link in self._links.values():
                    link.send(Kind.STEP, message.data.cast("B"))
        except (RankLost, LinkClosed) as error:
            raise RanksLost(self.lost or str(error)) from error
        if self.lost is not None:
            raise RanksLost(self.lost)

    def close(self) -> None:
        """Stop all ranks after their step, or end them where they take too long. Idempotent."""
        if self._watch is not None:
            self._watch.stop()
        self._set_lost("this worker ends")
        with contextlib.suppress(LinkClosed):
            for link in self._links.values():
                link.send(Kind.STOP)
            for link in self._links.values():
                link.expect_end(STOP_SECONDS)
        self._end_ranks()
        self._processes.wait()

    def _end_ranks(self) -> None:
        self._listener.close()
        if self._watch is not None:
            self._exchange.end()
        for link in self._links.values():
            link.close()
        self._processes.kill()


def run_rank(
    rank: int,
    leader_address: str,
    secret: str,
    cluster: str,
    *,
    on_loss: Callable[[str], object] = lambda reason: None,
) -> None:
    """Join the worker whose rank 0 listens at "host:port" as this rank, and compute a part of each step. Return when it
    stops.

    Raises RanksLost when rank 0 has ended, ValueError for a part that cannot be loaded, and LinkClosed where nobody
    listens there. `on_loss` is called before that with the reason, on another thread.
    """
    host, _, port = leader_address.rpartition(":")
    link = connected(without_brackets(host), int(port), _contexts(secret, cluster), ANSWER_SECONDS)
    try:
        _Rank(rank, link, on_loss).run()
    finally:
        link.close()


class _Rank:
    """Implements `Leader` for a rank other than 0, from its first frame on."""

    def __init__(self, rank: int, link: Link, on_loss: Callable[[str], object]) -> None:
        self._link = link
        self._on_loss = on_loss
        link.send_json(Kind.HELLO, rank=rank, code=code_version())
        start = link.expect(Kind.START, CONNECT_SECONDS)
        self._config = EngineConfig(**start.json("config"))
        library, size = kernels_for(self._config), int(start.json("size"))
        self._exchange = Exchange(self._config, library, rank=rank, size=size, tell=self._tell)
        link.send_json(Kind.MAPPED, is_mapped=self._exchange.map_memory(start.json("memory")))
        if not link.expect(Kind.GO, CONNECT_SECONDS).json("share_memory"):
            self._exchange.leave_memory()
        self._steps = queue.SimpleQueue[bytearray | None]()
        """Steps that came by the link. None ends them."""
        self._pools = queue.SimpleQueue[Frame | None]()
        """The sizes of the pools. None in their place ends this rank."""
        self._has_stopped = False

    def run(self) -> None:
        watch = Watch(
            [self._link],
            on_frame=self._take,
            on_loss=lambda _, reason: self._lose(reason),
            longest_silence=_never,
        )
        watch.start()
        try:
            follower = self._load() if self._config.engine == "model" else None
            self._link.send(Kind.READY)
            logger.info("rank %d of %d has loaded its part", self._exchange.rank, self._exchange.size)
            while True:
                arrays = self.next_step()
                assert follower is not None, "a simulated engine has no steps for other ranks"
                follower.run(arrays)
        except (RankLost, LinkClosed, RanksLost) as error:
            if not self._has_stopped:
                raise RanksLost(f"rank 0 is lost: {error}") from error
        finally:
            watch.stop()

    def _load(self) -> Follower:
        """Load the part. Raises ValueError where that is not possible, and tells rank 0 the reason."""
        try:
            collective = self._exchange.meet(host=self._link.local_host, on_failure=self._fail)
            return load_follower(self._config, collective, self)
        except (RankLost, LinkClosed, RanksLost):
            raise
        except Exception as error:
            with contextlib.suppress(LinkClosed):
                self._fail(f"it cannot load its part: {error}")
            raise

    def _fail(self, reason: str) -> None:
        """Tell rank 0 why this rank can go on no more."""
        self._link.send_json(Kind.FAILED, reason=reason)

    def _tell(self, key: str, value: bytes) -> None:
        """Tell rank 0 a value, which tells it the others."""
        self._link.send_json(Kind.STORE, key=key, value=value.hex())

    def pool_sizes(self) -> tuple[int, int]:
        frame = self._pools.get()
        if frame is None:
            raise LinkClosed("rank 0 has ended")
        return int(frame.json("num_blocks")), int(frame.json("num_host_slots"))

    def has_loaded(self) -> None:
        self._link.send(Kind.LOADED)

    def has_measured(self, budget_bytes: int) -> None:
        self._link.send_json(Kind.MEASURED, budget_bytes=budget_bytes)

    def next_step(self) -> StepArrays:
        if self._exchange.ring is not None:
            return unpack(self._exchange.ring.receive())
        message = self._steps.get()
        if message is None:
            raise LinkClosed("no more steps come")
        return unpack(message)

    def _take(self, _: int, frame: Frame) -> None:
        if frame.kind is Kind.STEP:
            self._steps.put(frame.data)
        elif frame.kind is Kind.POOLS:
            self._pools.put(frame)
        elif frame.kind is Kind.STORE:
            self._exchange.store.put(frame.json("key"), bytes.fromhex(frame.json("value")))
        elif frame.kind is Kind.STOP:
            self._has_stopped = True
            self._end()

    def _lose(self, reason: str) -> None:
        if not self._has_stopped:
            self._end()
            self._on_loss(reason)

    def _end(self) -> None:
        self._exchange.end()
        self._steps.put(None)
        self._pools.put(None)


def _never(_: int) -> float:
    """Return the longest silence of rank 0. A frozen one may go on: its routers decide."""
    return math.inf


def _contexts(secret: str, cluster: str) -> Callable[[bool], ssl.SSLContext]:
    contexts = peer_contexts(None, secret=secret, cluster=f"{cluster} ranks")
    if contexts is None:
        raise ValueError("ranks need a secret")
    return contexts


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def main(rank: str, leader_address: str, cluster: str) -> int:
    """Run a rank that another process has started. It ends with that process."""
    configure_logging()
    # A terminal's Ctrl-C reaches all processes. Rank 0 drains first, and ends the others after that.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        secret = os.environ[SECRET_VARIABLE]
        run_rank(int(rank), leader_address, secret, cluster, on_loss=lambda _: os._exit(1))
    except (ValueError, RanksLost, LinkClosed) as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    logging.shutdown()
    # The interpreter's own end waits for locks, and threads that have ended may have held them.
    os._exit(status)
