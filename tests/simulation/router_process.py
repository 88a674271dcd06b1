"""One life of a router: the real fleet, placer, relay, look-up, ledger and registry, in a simulated process.

Puts together what router/server.py and router/service.py do, without gRPC's server and without text. Owns what a
client sees of a request, and says so where two pieces do not join.
"""

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from blockyard.proto.block_hash import chain, pack_tokens
from blockyard.proto.v1 import session_pb2
from blockyard.router.admission import AdmissionLedger
from blockyard.router.errors import DeadlinePassed, RouterError
from blockyard.router.fleet import Fleet
from blockyard.router.outputs import TokenChunk
from blockyard.router.placer import Placer
from blockyard.router.prefix_index import PrefixLookup, PrefixLookupConfig
from blockyard.router.relay import Generation, Relay
from blockyard.router.requests import RequestRegistry

from .calls import Connections, MemoryChannel
from .index_access import IndexServer, RemoteIndex
from .scenario import MAX_MIGRATIONS, NO_WORKER_SECONDS, Request
from .virtual_time import START_SECONDS, Process, VirtualLoop
from .worker_process import SECRET, TOKENIZER

SUSPECT_SECONDS = 0.6
LOST_SECONDS = 1.0
STALL_SECONDS = 2.0


@dataclass(slots=True)
class Record:
    """What the client of one request saw."""

    request: Request
    router: str
    arrived: float
    outputs: list[list[int]] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    outcome: str = ""
    """"finished", or the reason of an error."""
    ended: float = 0.0
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """From when to when it brought nothing."""
    defects: list[str] = field(default_factory=list)

    def take(self, chunk: TokenChunk, now: float) -> None:
        tokens = self.outputs[chunk.index]
        if self.outcome:
            self.defects.append("tokens came after the end")
        if chunk.index in self.finished:
            self.defects.append(f"output {chunk.index} went on after its finish")
        if chunk.offset != len(tokens):
            self.defects.append(f"output {chunk.index} goes on at {chunk.offset}, not {len(tokens)}")
        tokens += chunk.token_ids
        self._brought(now)
        if chunk.finish is not None:
            self.finished.add(chunk.index)

    def end(self, outcome: str, now: float) -> None:
        if self.outcome:
            self.defects.append(f"ended twice: {self.outcome}, then {outcome}")
        self.outcome, self.ended = outcome, now
        self._brought(now)

    def _brought(self, now: float) -> None:
        since = self.pauses[-1][1] if self.pauses else self.arrived
        self.pauses.append((since, now))


class RouterProcess:
    """To be made on the loop; `start`, then requests by `serve`."""

    def __init__(
        self, name: str, loop: VirtualLoop, connections: Connections, index: IndexServer, seed: int
    ) -> None:
        self.name = name
        self.process = Process(name, loop)
        self._loop = loop
        self.fleet = Fleet(
            tokenizer_fingerprint=TOKENIZER,
            suspect_seconds=SUSPECT_SECONDS,
            lost_seconds=LOST_SECONDS,
            stall_seconds=STALL_SECONDS,
            clock=loop.time,
            rng=random.Random(seed),
            open_channel=lambda address: MemoryChannel(connections, self.process, address),  # type: ignore[arg-type, return-value]
        )
        self.ledger = AdmissionLedger(
            max_requests=1000, max_tokens=100_000, clock=loop.time, rng=random.Random(seed)
        )
        self.registry = RequestRegistry(clock=loop.time)
        self.placer: Placer
        self.relay: Relay
        self._index, self._seed = index, seed
        self._records: dict[int, Record] = {}

    def start(self, addresses: list[str]) -> None:
        self.process.start(self._run(addresses))

    async def _run(self, addresses: list[str]) -> None:
        lookup = PrefixLookup(
            RemoteIndex(self._index), config=PrefixLookupConfig(open_seconds=0.3), clock=self._loop.time
        )
        self.placer = Placer(
            self.fleet,
            lookup,
            policy="prefix",
            no_worker_seconds=NO_WORKER_SECONDS,
            clock=self._loop.time,
            rng=random.Random(self._seed),
        )
        self.relay = Relay(
            self.fleet,
            self.placer,
            max_migrations=MAX_MIGRATIONS,
            clock=self._loop.time,
            rng=random.Random(self._seed),
        )
        self.fleet.set_addresses(addresses)
        await self.fleet.run()

    def accept(self, record: Record, on_end: Callable[[Record], None]) -> asyncio.Task[None]:
        return self.process.start(self._serve(record, on_end))

    async def _serve(self, record: Record, on_end: Callable[[Record], None]) -> None:
        try:
            await self._generate(record)
            outcome = "finished"
        except RouterError as error:
            outcome = error.reason
        except asyncio.CancelledError:
            outcome = "CANCELLED"
        record.end(outcome, self._loop.time() - START_SECONDS)
        on_end(record)

    async def _generate(self, record: Record) -> None:
        request, now = record.request, self._loop.time()
        charge = self.ledger.charge(len(request.prompt), outputs=request.num_sequences, tenant=request.tenant)
        with charge, self.registry.hold(request.request_id, tenant=request.tenant) as held:
            try:
                async with asyncio.timeout(request.deadline_seconds):
                    generation = await self._generation(request, now + request.deadline_seconds)
                    stopped: set[int] = set()
                    async with aclosing(self.relay.run(generation, held.progress, stopped)) as chunks:
                        async for chunk in chunks:
                            record.take(chunk, self._loop.time() - START_SECONDS)
                            if len(record.outputs[chunk.index]) >= request.stop_after.get(chunk.index, 10**9):
                                stopped.add(chunk.index)
            except TimeoutError:
                raise DeadlinePassed("the deadline passed before the answer was complete") from None

    async def _generation(self, request: Request, deadline: float) -> Generation:
        identity = await self.placer.identity()
        prompt = pack_tokens(request.prompt)
        root = identity.root(cluster_secret=SECRET, salt="")
        return Generation(
            request_id=request.request_id,
            prompt=prompt,
            prompt_tokens=len(request.prompt),
            block_names=b"".join([root, *chain(root, prompt, identity.block_size)]),
            sampling=session_pb2.EngineSampling(
                top_p=1.0,
                max_tokens=request.max_tokens,
                seed=request.seed,
                stop_token_ids=request.stop_token_ids,
                n=request.n,
                beam_width=request.beam_width,
                length_penalty=1.0,
            ),
            deadline=deadline,
            priority=request.priority,
            client=request.tenant,
        )
