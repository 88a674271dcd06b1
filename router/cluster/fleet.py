"""Fleet: one link to each known worker address, one view of all workers, and the model identity that they share.

Connects link.py (connections) to view.py (state). Does not own where addresses come from (server.py) or requests
(generation/relay.py).
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from blockyard.proto.naming.block_hash import root_name
from blockyard.proto.naming.block_kind import BlockKind, difference
from blockyard.proto.v1 import cluster_pb2, session_pb2
from blockyard.router.cluster.link import EngineLink, LinkEvents, OpenChannel, open_insecure_channel
from blockyard.router.cluster.view import ClusterView
from blockyard.router.cluster.worker_view import LinkState, WorkerView
from blockyard.router.placement.config import PlacementConfig

logger = logging.getLogger(__name__)

MEASURE_SECONDS = 10.0
"""Least time between two questions to a worker to measure how fast blocks reach it."""
MAX_ASKED = 16
"""Workers, drawn at random, among which room for preempted sequences of another one is looked for."""
REPORTS_A_SECOND = 500
"""Reports of load alone that a router asks for from all workers together. They take it less than a tenth of a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """Properties of the first accepted worker, which count as long as the fleet lives.

    `difference` tells whether a later worker fits them. If all workers come back with other ones, the router builds the
    model's group anew, with a fleet of its own (`Fleet.is_outdated`).
    """

    model_fingerprint: str
    block_size: int
    kv_dtype: str
    max_model_len: int
    vocab_size: int
    index_stride_blocks: int = 1
    """N: the prefix index has every Nth block of a prefix."""

    @classmethod
    def of(cls, hello: session_pb2.Hello) -> "ModelIdentity":
        return cls(
            model_fingerprint=hello.model_fingerprint,
            block_size=hello.block_size,
            kv_dtype=hello.kv_dtype,
            max_model_len=hello.max_model_len,
            vocab_size=hello.vocab_size,
            index_stride_blocks=max(1, hello.index_stride_blocks),
        )

    def root(self, *, cluster_secret: str, salt: str, tenant: str = "", adapter: str = "") -> bytes:
        """Return the root of a prompt's chain of block names: a tenant's own root, or the public one. `adapter` is the
        fingerprint of the LoRA adapter that computes the blocks."""
        return root_name(
            cluster_secret=cluster_secret,
            model_fingerprint=self.model_fingerprint,
            block_size=self.block_size,
            kv_dtype=self.kv_dtype,
            adapter=adapter,
            salt=salt,
            tenant=tenant,
        )

    def difference(self, hello: session_pb2.Hello) -> str | None:
        """Return why a worker cannot serve beside the first one, or None if it can. Its context may be longer."""
        if hello.model_fingerprint != self.model_fingerprint:
            return "other model files or another data type (--dtype) than the first worker's"
        if hello.block_size != self.block_size:
            return f"block size {hello.block_size}, the first worker's is {self.block_size}"
        stride_blocks = max(1, hello.index_stride_blocks)
        if stride_blocks != self.index_stride_blocks:
            return f"index stride of {stride_blocks} blocks, the first worker's is {self.index_stride_blocks}"
        if hello.kv_dtype != self.kv_dtype:
            return f"KV dtype {hello.kv_dtype}, the first worker's is {self.kv_dtype}"
        if hello.max_model_len < self.max_model_len:
            return f"context of {hello.max_model_len} tokens, the first worker's is {self.max_model_len}"
        return None


class Fleet(LinkEvents):
    """Links to all workers. `run` opens, keeps and drops them. `set_addresses` may be called at any time."""

    def __init__(
        self,
        *,
        tokenizer_fingerprint: str,
        model: str = "",
        suspect_seconds: float,
        lost_seconds: float,
        stall_seconds: float = inf,
        clock: Callable[[], float] = time.monotonic,
        placement: PlacementConfig | None = None,
        open_channel: OpenChannel = open_insecure_channel,
        rng: random.Random | None = None,
        code: str = "",
        pulls: bool = True,
    ) -> None:
        self.view = ClusterView(
            suspect_seconds=suspect_seconds, lost_seconds=lost_seconds, clock=clock, config=placement
        )
        self.identity: ModelIdentity | None = None
        self.links: dict[str, EngineLink] = {}
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._model = model
        """Name of the model, as in Hello. Empty: the one that the cluster began with."""
        self._lost_seconds = lost_seconds
        self._stall_seconds = stall_seconds
        self._clock = clock
        self._open_channel = open_channel
        self._rng = rng or random.Random()
        self._code = code
        """Code version of this router. Empty: versions are not compared."""
        self._pulls = pulls
        self._measure_at: dict[str, float] = {}
        """Times before which workers are not asked again to measure their links, by address."""
        self._told: set[frozenset[tuple[str, int]]] = set()
        """Pairs of workers that exchange no blocks, as the log has them: each with the kind of its blocks."""
        self._served_at = clock()
        """When `is_outdated` last saw an accepted worker. At first, when the fleet was made."""
        self._wanted: frozenset[str] = frozenset()
        self._rearrange = asyncio.Event()
        self._listeners: list[Callable[[str], None]] = []

    def on_change(self, listener: Callable[[str], None]) -> None:
        """Call `listener` from now on with a worker's address whenever it is heard, accepted, refused, disconnected or
        removed."""
        self._listeners.append(listener)

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Set the addresses to connect to. A worker that is no longer listed stays until its connection ends."""
        self._wanted = frozenset(addresses)
        self._rearrange.set()

    def has_failed(self, address: str) -> bool:
        """Return True if the last attempt to connect to the address failed."""
        link = self.links.get(address)
        return link is not None and link.has_failed

    def is_outdated(self) -> bool:
        """Return True if no worker has been accepted for `lost_seconds`, and one is refused only because its files or
        settings differ from those that this router knows. Call it often: it watches the time."""
        workers, now = self.view.workers(), self._clock()
        if any(worker.link is LinkState.ACCEPTED for worker in workers):
            self._served_at = now
        if now - self._served_at < self._lost_seconds:
            return False
        return any(
            worker.link is LinkState.REFUSED and worker.hello is not None and self._differs(worker.hello)
            for worker in workers
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            running: dict[str, asyncio.Task[None]] = {}
            try:
                while True:
                    self._rearrange.clear()
                    for address in sorted(self._wanted - running.keys()):
                        running[address] = tasks.create_task(self._link(address).run())
                    for address in sorted(running.keys() - self._wanted):
                        if not self.links[address].is_up:
                            self._drop(address, running.pop(address))
                    await self._rearrange.wait()
            finally:
                for link in self.links.values():
                    link.stop()

    def accept(self, address: str, hello: session_pb2.Hello) -> str | None:
        if address not in self.links:
            return "the address is no longer listed"
        refusal = self._refusal(address, hello)
        if refusal is None:
            self.identity = self.identity or ModelIdentity.of(hello)
            self.view.accepted(address, hello)
            self._tell_unlike(address, hello)
            if self._code and hello.version != self._code:
                # The worker serves, because messages are compatible across versions. The operator should know.
                logger.warning(
                    "worker %s at %s runs blockyard %s, this router %s",
                    hello.worker_id,
                    address,
                    hello.version,
                    self._code,
                )
        else:
            if self.view.refused(address, hello, refusal):
                logger.error("refused worker %s at %s: %s", hello.worker_id, address, refusal)
        self._changed(address)
        return refusal

    def _tell_unlike(self, address: str, hello: session_pb2.Hello) -> None:
        """Log, once for each pair, with which worker of each other kind of blocks this one exchanges none."""
        worker = self.view.at(address)
        for other in self.view.unlike(worker) if worker is not None and self._pulls else ():
            assert worker is not None
            assert other.hello is not None, "it was accepted"
            pair = frozenset(((worker.worker_id, worker.kind), (other.worker_id, other.kind)))
            if pair not in self._told:
                self._told.add(pair)
                logger.warning(
                    "workers %s and %s exchange no blocks, and compute what they lack: %s",
                    worker.worker_id,
                    other.worker_id,
                    difference(str(BlockKind.of(hello)), str(BlockKind.of(other.hello))),
                )

    def heard(
        self, address: str, load: cluster_pb2.WorkerLoad | None, last_handle: int | None = None
    ) -> None:
        self.view.heard(address, load, last_handle)
        if self._pulls and load is not None and not load.pull_bytes_per_second:
            self._measure_link(address)
        self._changed(address)

    def _measure_link(self, address: str) -> None:
        """Ask a worker, now and then, to measure how fast blocks reach it from another one of its kind, drawn at
        random."""
        worker, now = self.view.at(address), self._clock()
        # Without host memory it can fetch nothing.
        if (
            worker is None
            or not worker.load.host_tokens_per_second
            or now < self._measure_at.get(address, now)
        ):
            return
        other = next(iter(self._some_like(worker)), None)
        source = None if other is None else self.view.pull_source(other, 0, 0)
        if source is not None:  # else the next report draws again
            self._measure_at[address] = now + MEASURE_SECONDS
            self.links[address].measure_link(source.transfer_address, source.incarnation)

    def arrived(self, address: str, marks: bytes, withdrawn_marks: bytes) -> None:
        self.view.arrived(address, marks, withdrawn_marks)

    def draining(self, address: str, is_draining: bool) -> None:
        self.view.draining(address, is_draining)
        self._changed(address)

    def index_reported(self, address: str, index: cluster_pb2.WorkerIndex) -> None:
        worker = self.view.at(address)
        if worker is not None:
            worker.index = index

    def disconnected(self, address: str, reason: str) -> None:
        self.view.disconnected(address, reason)
        # An address that is no longer listed was kept only for its connection.
        self._rearrange.set()
        self._changed(address)

    @property
    def report_seconds(self) -> float:
        return len(self.links) / REPORTS_A_SECOND

    def room_elsewhere(self, address: str) -> session_pb2.Room | None:
        if not self._pulls or not self.view.is_short(address):
            return None
        worker = self.view.at(address)
        asked = [] if worker is None else self._some_like(worker)
        return max(map(self.view.room, asked), key=lambda room: room.blocks, default=None)

    def _some_like(self, worker: WorkerView) -> list[WorkerView]:
        """Return other ready workers, drawn at random, which exchange blocks with this one."""
        others = self.view.ready_like(worker)
        return self._rng.sample(others, min(len(others), MAX_ASKED))

    def _link(self, address: str) -> EngineLink:
        self.view.known(address)
        link = EngineLink(
            address,
            self,
            lost_seconds=self._lost_seconds,
            stall_seconds=self._stall_seconds,
            clock=self._clock,
            open_channel=self._open_channel,
            rng=self._rng,
        )
        self.links[address] = link
        return link

    def _drop(self, address: str, task: asyncio.Task[None]) -> None:
        self.links.pop(address).stop()
        self._measure_at.pop(address, None)
        task.cancel()
        self.view.forget(address)
        self._changed(address)

    def _refusal(self, address: str, hello: session_pb2.Hello) -> str | None:
        if hello.model != self._model:
            return f"serves {_model_called(hello.model)}, and this address is one of {_model_called(self._model)}"
        if hello.tokenizer_fingerprint != self._tokenizer_fingerprint:
            return (
                "another tokenizer or chat template than the router's: the files changed, or differ by node"
            )
        if hello.block_size < 1 or hello.max_model_len < 1 or hello.vocab_size < 1:
            return "a hello without block size, context or vocabulary"
        if hello.stalled_seconds > self._stall_seconds:
            return f"its engine has finished no step for {hello.stalled_seconds:.0f} s"
        if (namesake := self.view.namesake(address, hello)) is not None:
            return f"worker id {hello.worker_id} is already in use at {namesake}: choose another --worker-id"
        return self.identity.difference(hello) if self.identity else None

    def _differs(self, hello: session_pb2.Hello) -> bool:
        return hello.model == self._model and (
            hello.tokenizer_fingerprint != self._tokenizer_fingerprint
            or (self.identity is not None and self.identity.difference(hello) is not None)
        )

    def _changed(self, address: str) -> None:
        for listener in self._listeners:
            listener(address)


def _model_called(name: str) -> str:
    return f"model {name}" if name else "the cluster's first model"
