"""Cluster view: the events that change what a router knows of its workers, and what they will soon cache.

Pure: the clock is an argument. A placed request counts at once, as load and as a speculative prefix. So simultaneous
requests with a common prefix go to one worker before the index has that prefix.

Does not own what follows from the events (known_workers.py) or connections (link.py). Nor does it own one worker's
state (worker_view.py) or sums over placed requests (bookings.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from blockyard.proto.naming.block_kind import BlockKind
from blockyard.proto.v1 import cluster_pb2, session_pb2
from blockyard.router.cluster.bookings import Bookings, Placed
from blockyard.router.cluster.known_workers import KnownWorkers
from blockyard.router.cluster.worker_view import LinkState, WorkerView
from blockyard.router.placement.pulls import PullPlan
from blockyard.router.placement.rates import WorkerSpeed


class ClusterView(KnownWorkers):
    """All known workers. The events change what the base class answers."""

    def known(self, address: str) -> None:
        self._workers.setdefault(address, WorkerView(address=address))

    def forget(self, address: str) -> None:
        self._workers.pop(address, None)
        self._pulls.forget(address)
        self._ready = None
        if self._table is not None:
            self._table.remove(address)

    def accepted(self, address: str, hello: session_pb2.Hello) -> None:
        """Record a worker that introduced itself with `hello` and may serve. Its bookings begin empty.

        An incarnation that comes back keeps its measured speed and its age.
        """
        now, before = self._clock(), self._workers.get(address)
        is_same = (
            before is not None and before.hello is not None and before.hello.incarnation == hello.incarnation
        )
        worker = self._workers[address] = WorkerView(
            address=address,
            link=LinkState.ACCEPTED,
            hello=hello,
            load=hello.load,
            is_draining=hello.is_draining,
            last_heard=now,
            kind=self._pulls.number_of(BlockKind.of(hello)),
            speed=before.speed if before is not None and is_same else WorkerSpeed(),
        )
        self.speeds.report(worker.speed, hello.load, now)
        self._pulls.note(worker)
        self._state_changed(worker)

    def refused(self, address: str, hello: session_pb2.Hello, reason: str) -> bool:
        """Record a worker that must not be used. Return True unless it was refused for the same reason before."""
        before = self._workers.get(address)
        worker = self._workers[address] = WorkerView(
            address=address, link=LinkState.REFUSED, hello=hello, reason=reason, last_heard=self._clock()
        )
        self._state_changed(worker)
        return before is None or before.link is not LinkState.REFUSED or before.reason != reason

    def disconnected(self, address: str, reason: str) -> None:
        """Record the end of the stream. A worker that had been accepted stays visible as lost, without load and
        bookings.

        A refused worker stays refused.
        """
        worker = self._workers.get(address)
        if worker is None or worker.link is LinkState.REFUSED:
            return
        worker.link = LinkState.LOST if worker.hello else LinkState.CONNECTING
        worker.reason = reason
        worker.load = cluster_pb2.WorkerLoad()
        self._pulls.note(worker)
        worker.booked = Bookings()
        self._state_changed(worker)

    def heard(
        self, address: str, load: cluster_pb2.WorkerLoad | None = None, last_handle: int | None = None
    ) -> None:
        """Record a message of the worker, and its load report if it has one.

        The report counts our requests up to `last_handle`, or all if it is None.
        """
        worker, now = self._workers[address], self._clock()
        if not self._is_ready(worker, now):
            self._ready = None
        worker.last_heard = now
        if load is not None:
            worker.note_steps(load)
            worker.load = load
            self._pulls.note(worker)
            self.speeds.report(worker.speed, load, now)
            worker.booked.reported(last_handle)
            if load.waiting == 0:
                worker.gate.queue_was_empty(now)
        self._changed(worker)

    def placed(
        self,
        address: str,
        *,
        names: Sequence[bytes],
        prompt_tokens: int,
        uncached_tokens: int,
        blocks: int,
        promised_blocks: int = 0,
        pull: PullPlan | None = None,
        is_split: bool = False,
        adapter: str = "",
    ) -> Placed:
        worker = self._workers[address]
        placed = Placed(
            address=address,
            names=names,
            prompt_tokens=prompt_tokens,
            uncached_tokens=uncached_tokens,
            blocks=blocks,
            promised_blocks=promised_blocks,
            pull=pull,
            is_split=is_split,
            adapter=adapter,
        )
        worker.booked.add(placed)
        self._pulls.count(placed, 1)
        if names:
            self._expectations.note(names[0], address)
            self._expectations.sweep(self._expects)
        self._changed(worker)
        return placed

    @contextmanager
    def without(self, placed: Placed) -> Iterator[None]:
        """Leave out an unsent request's booking for the life of the context, in which its worker is chosen again."""
        worker = self._workers.get(placed.address)
        if worker is None or placed not in worker.booked:
            yield
            return
        worker.booked.remove(placed)
        self._changed(worker)
        try:
            yield
        finally:
            worker.booked.add(placed)
            self._changed(worker)

    def sent(self, placed: Placed) -> None:
        """Record that the request is now sent to its worker."""
        worker = self._workers.get(placed.address)
        if worker is not None and placed in worker.booked:
            worker.booked.send(placed)
            worker.gate.took_one(self._clock())
            self._changed(worker)

    def has_room(self, address: str) -> bool:
        """Return True if one more request should find a position in the worker's own queue."""
        worker = self._workers.get(address)
        return worker is not None and worker.has_room(self._clock(), self._config.max_unstarted)

    def started(self, placed: Placed, *, cached_tokens: int | None = None) -> None:
        """Record a request's first output: the worker has cached the prompt, and the index will soon know. Ignore later
        ones.

        `cached_tokens` are the prompt tokens that the worker reused, to compare with the index's promise. None: do not
        compare.
        """
        self.pull_ended(placed)  # A worker that needed no pull reports none.
        worker = self._workers.get(placed.address)
        if worker is None or placed.started or placed not in worker.booked:
            return
        worker.booked.start(placed, stored_at=self._clock() + self._config.stored_grace_seconds)
        worker.gate.freed_one()
        self._changed(worker)
        if cached_tokens is not None and worker.hello is not None:
            reused_blocks = cached_tokens // worker.hello.block_size
            self.reused_blocks += reused_blocks
            self.promised_blocks += placed.promised_blocks
            self.stale_blocks += max(placed.promised_blocks - reused_blocks, 0)

    def pull_ended(self, placed: Placed) -> None:
        """Record that the request's pull has ended, whether it brought all of its blocks or not."""
        self._pulls.count(placed, -1)
        placed.pull = None

    def arrived(self, address: str, marks: bytes, withdrawn_marks: bytes = b"") -> None:
        """Record the marks of prompts that have reached the worker, from whichever router. Forget the others."""
        worker = self._workers.get(address)
        if worker is not None:
            self._arrivals.add(worker, marks)
            self._arrivals.withdraw(worker, withdrawn_marks)

    def draining(self, address: str, is_draining: bool = True) -> None:
        """Record whether the worker takes new requests. Running ones continue."""
        worker = self._workers.get(address)
        if worker is not None and worker.is_draining is not is_draining:
            worker.is_draining = is_draining
            self._state_changed(worker)

    def ended(self, placed: Placed, *, busy: bool = False) -> None:
        """Record that a request has left its worker, for whatever reason. `busy`: the worker refused it, because its
        queue was full."""
        self.pull_ended(placed)
        worker = self._workers.get(placed.address)
        if worker is None or placed not in worker.booked:
            return
        worker.booked.remove(placed)
        self._changed(worker)
        if busy:
            worker.gate.shut(self._clock())
        elif placed.sent and not placed.started:
            # A started request has already left its position in the worker's queue.
            worker.gate.freed_one()
