"""One incarnation of a router: the real fleet, placer, relay, look-up, ledger and registry, in a simulated process.

Joins them as router/server.py and router/generation/generation.py do, without gRPC's server and without text. Owns the
order of admission, placement and relay. Does not own what a client does with its tokens.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from blockyard.proto.naming.block_hash import chain, pack_tokens
from blockyard.proto.v1 import session_pb2
from blockyard.router.adapters.registry import RegisteredAdapter
from blockyard.router.admission.ledger import AdmissionLedger
from blockyard.router.cluster.bookings import Placed
from blockyard.router.cluster.fleet import Fleet
from blockyard.router.config import (
    DEFAULT_LOST_SECONDS,
    DEFAULT_MAX_MIGRATIONS,
    DEFAULT_NO_WORKER_SECONDS,
    DEFAULT_STALL_SECONDS,
    DEFAULT_SUSPECT_SECONDS,
)
from blockyard.router.dispatch.placer import Placer
from blockyard.router.dispatch.prefix_lookup import PrefixLookup, PrefixLookupConfig
from blockyard.router.errors import DeadlinePassed, RouterError
from blockyard.router.generation.attempt import Progress
from blockyard.router.generation.joined_outputs import TokenChunk
from blockyard.router.generation.registry import RequestRegistry
from blockyard.router.generation.relay import Generation, Relay
from blockyard.router.placement.config import PlacementConfig, PolicyName

from simulation.calls import Connections, MemoryChannel
from simulation.index_access import IndexServer, RemoteIndex
from simulation.virtual_time import START_SECONDS, Process, VirtualLoop
from simulation.worker_process import SECRET, TOKENIZER


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSetup:
    """Settings that all routers of a run share."""

    policy: PolicyName = "prefix"
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    lookup: PrefixLookupConfig = field(default_factory=PrefixLookupConfig)
    suspect_seconds: float = DEFAULT_SUSPECT_SECONDS
    lost_seconds: float = DEFAULT_LOST_SECONDS
    stall_seconds: float = DEFAULT_STALL_SECONDS
    no_worker_seconds: float = DEFAULT_NO_WORKER_SECONDS
    max_migrations: int = DEFAULT_MAX_MIGRATIONS
    max_requests: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A client's request to a router."""

    request_id: str
    prompt: Sequence[int]
    sampling: session_pb2.EngineSampling
    deadline_seconds: float
    priority: int = 0
    tenant: str = ""
    session_id: str = ""
    expected_pause_seconds: float = 0.0
    adapter: RegisteredAdapter | None = None


class Client(Protocol):
    """Receives the events of one Call. Times are seconds since the start of the run."""

    def take(self, chunk: TokenChunk, progress: Progress, now: float) -> bool:
        """Take tokens. Return True to end their output, as a stop string does."""
        ...

    def end(self, outcome: str, now: float) -> None:
        """Take note that the call has ended. `outcome` is "finished", "CANCELLED" or the reason of an error."""
        ...


class _CountingPlacer(Placer):
    num_refusals = 0
    """Requests that a worker with a full queue sent back."""

    def ended(self, placed: Placed, *, busy: bool = False) -> None:
        self.num_refusals += busy
        super().ended(placed, busy=busy)


class RouterProcess:
    """A router. Create it on the loop, call `start`, then send requests by `accept`."""

    def __init__(
        self,
        name: str,
        setup: RouterSetup,
        loop: VirtualLoop,
        connections: Connections,
        index: IndexServer,
        seed: int,
    ) -> None:
        self.name = name
        self.process = Process(name, loop)
        self._setup = setup
        self._loop = loop
        self.fleet = Fleet(
            tokenizer_fingerprint=TOKENIZER,
            suspect_seconds=setup.suspect_seconds,
            lost_seconds=setup.lost_seconds,
            stall_seconds=setup.stall_seconds,
            clock=loop.time,
            placement=setup.placement,
            rng=random.Random(seed),
            open_channel=lambda address: MemoryChannel(connections, self.process, address),  # type: ignore[arg-type, return-value]
        )
        self.ledger = AdmissionLedger(
            max_requests=setup.max_requests,
            max_tokens=setup.max_tokens,
            clock=loop.time,
            rng=random.Random(seed),
        )
        self.registry = RequestRegistry(clock=loop.time)
        self.placer: _CountingPlacer
        self.relay: Relay
        self._index, self._seed = index, seed

    def start(self, addresses: list[str]) -> None:
        self.process.start(self._run(addresses))

    async def _run(self, addresses: list[str]) -> None:
        setup, clock = self._setup, self._loop.time
        self.placer = _CountingPlacer(
            self.fleet,
            PrefixLookup(RemoteIndex(self._index), config=setup.lookup, clock=clock),
            policy=setup.policy,
            no_worker_seconds=setup.no_worker_seconds,
            clock=clock,
            rng=random.Random(self._seed),
            config=setup.placement,
        )
        self.relay = Relay(
            self.fleet,
            self.placer,
            max_migrations=setup.max_migrations,
            clock=clock,
            rng=random.Random(self._seed),
        )
        self.fleet.set_addresses(addresses)
        await self.fleet.run()

    def meet(self, addresses: list[str]) -> None:
        """Connect to these workers, some of which are new."""
        self.process.start(self._meet(addresses))

    async def _meet(self, addresses: list[str]) -> None:
        self.fleet.set_addresses(addresses)

    def accept(self, call: Call, client: Client) -> asyncio.Task[None]:
        return self.process.start(self._serve(call, client))

    async def _serve(self, call: Call, client: Client) -> None:
        try:
            await self._generate(call, client)
            outcome = "finished"
        except RouterError as error:
            outcome = error.reason
        except asyncio.CancelledError:
            outcome = "CANCELLED"
        client.end(outcome, self._loop.time() - START_SECONDS)

    async def _generate(self, call: Call, client: Client) -> None:
        num_sequences = max(call.sampling.n, call.sampling.beam_width, 1)
        deadline = self._loop.time() + call.deadline_seconds
        charge = self.ledger.charge(len(call.prompt), outputs=num_sequences, tenant=call.tenant)
        with charge, self.registry.hold(call.request_id, tenant=call.tenant) as held:
            try:
                async with asyncio.timeout(call.deadline_seconds):
                    generation = await self._generation(call, deadline)
                    await self.relay.run(
                        generation,
                        held.progress,
                        lambda chunk: client.take(chunk, held.progress, self._loop.time() - START_SECONDS),
                    )
            except TimeoutError:
                raise DeadlinePassed("the deadline passed before the answer was complete") from None

    async def _generation(self, call: Call, deadline: float) -> Generation:
        identity = await self.placer.identity()
        prompt = pack_tokens(call.prompt)
        fingerprint = "" if call.adapter is None else call.adapter.fingerprint
        root = identity.root(cluster_secret=SECRET, salt="", adapter=fingerprint)
        return Generation(
            request_id=call.request_id,
            prompt=prompt,
            prompt_tokens=len(call.prompt),
            block_names=b"".join([root, *chain(root, prompt, identity.block_size)]),
            sampling=call.sampling,
            deadline=deadline,
            priority=call.priority,
            client=call.tenant,
            session_id=call.session_id,
            expected_pause_seconds=call.expected_pause_seconds,
            adapter=call.adapter,
        )
