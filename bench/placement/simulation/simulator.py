"""One run: sends a workload through real routers and workers in virtual time, and computes the result.

Owns the arrival of requests, samples of idle and crowded workers, and the arithmetic of the result.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import inf
from random import Random
from statistics import fmean
from typing import Any

from blockyard.deploy.bench.workloads.requests import MAX_TOKEN, PlannedRequest, Workload
from blockyard.proto.naming.block_hash import chain
from blockyard.proto.roles import Role
from blockyard.proto.v1.session_pb2 import EngineSampling
from blockyard.router.adapters.registry import RegisteredAdapter
from blockyard.router.cluster.depths import usable_cached_tokens
from blockyard.router.generation.attempt import Progress
from blockyard.router.generation.joined_outputs import TokenChunk
from blockyard.router.placement.config import PlacementConfig, PolicyName
from blockyard.router.placement.rates import ClusterSpeeds, WorkerSpeed
from blockyard.worker.config import EngineConfig, WorkerConfig
from blockyard.worker.scheduling.scheduler import SchedulerConfig
from blockyard.worker.sequences.adapter import Adapter

from bench.placement.simulation.late_index import LateTwin
from bench.placement.simulation.profile import HardwareProfile, RooflineRunner
from bench.reporting import percentile
from simulation.calls import Connections
from simulation.index_access import IndexServer
from simulation.network import Network
from simulation.router_process import Call, RouterProcess, RouterSetup
from simulation.transfers import TransferNetwork
from simulation.virtual_time import START_SECONDS, VirtualLoop, bury
from simulation.worker_process import WorkerProcess, WorkerSetup

NETWORK_SECONDS = 0.0005
"""One-way latency between a router and a worker."""
INDEX_SECONDS = 0.0005
"""One-way latency between a router or a worker and the index."""
FIRST_ARRIVAL_SECONDS = 1.0
"""Start of arrivals, when every router knows every worker. Results count time from here."""
DEADLINE_SECONDS = 86_400.0
"""Time limit of every request, long enough that none is rejected or cut short."""
SAMPLE_SECONDS = 0.1
SAMPLES_A_WINDOW = 10
"""Samples in a window of one second. Placement must not leave one worker idle and another crowded for a window."""
CROWDED_SEQUENCES = 8
"""Running sequences from which a worker counts as crowded. It also does if any sequence waits."""
ADAPTER_BYTES = 87_000_000
"""Bytes of an adapter of rank 16 on all linears of Qwen3-8B, in bf16."""
ROOT = bytes(16)
"""Start of the chains of block names in `ideal_reuse`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A cluster and its placement policy."""

    policy: PolicyName = "prefix"
    num_workers: int = 8
    num_routers: int = 1
    index_lag_seconds: float = 0.0
    """Time until look-ups see what a worker has published."""
    seed: int = 0
    profile: HardwareProfile = field(default_factory=HardwareProfile)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    slowness: tuple[float, ...] = ()
    """Factor of each step's time, for the first workers. The others have 1."""
    num_joiners: int = 0
    """How many of the workers, the last ones, join later, with an empty cache."""
    join_seconds: float = 0.0
    """When they join, in seconds after the first arrivals."""
    pulls: bool = False
    """Whether workers may fetch blocks from one another."""
    num_prefill_workers: int = 0
    """How many of the workers, the first ones, have the role `prefill`."""
    role: Role = "both"
    """Role of the other workers."""
    num_adapters: int = 0
    """LoRA adapters that requests may name. Each worker has all of them in host memory."""
    max_loras: int = 0
    """Adapters that each worker's device holds at once."""
    has_uniform_speeds: bool = False
    """Whether routers take all workers to be equally fast, for comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of a run. Times are in seconds, rates in tokens per second."""

    num_requests: int
    prompt_tokens: int
    reuse: float
    """Share of prompt tokens read from a cache."""
    ideal_reuse: float
    """Reuse with one unlimited cache that all workers share, and that knows each block at once."""
    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    token_gap_mean: float
    """Time between two tokens of a request, averaged over requests."""
    latency_p50: float
    latency_p99: float
    makespan: float
    output_rate: float
    largest_share: float
    """Share of the requests on the worker with the most requests."""
    busy_max: float
    """Share of the makespan in which the busiest worker computed."""
    busy_min: float
    idle_beside_crowded: float
    """Share of seconds, until the last arrival, in which one worker was always crowded and another always idle."""
    num_refusals: int
    num_preemptions: int
    pulled: float = 0.0
    """Share of prompt tokens that were fetched from another worker. A part of `reuse`, but for pulls that came too
    late."""
    pause_p50: float = 0.0
    """Longest time between two tokens of a request, over all requests."""
    pause_p99: float = 0.0
    num_splits: int = 0
    """Requests that one worker began and another continued."""
    adapter_loads: int = 0
    """Loads of LoRA adapters, over all workers."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True, kw_only=True)
class Record:
    """Record of one request, as its client. Times are seconds since the start; a token counts when a router has it."""

    request: PlannedRequest
    arrived: float
    on_end: Callable[["Record"], None]
    worker: str = ""
    first_token: float = inf
    last_token: float = inf
    longest_pause: float = 0.0
    """Longest time between two of its tokens."""
    ended: float = inf
    cached_tokens: int = 0
    outcome: str = ""

    def take(self, chunk: TokenChunk, progress: Progress, now: float) -> bool:
        self.first_token = min(self.first_token, now)
        self.longest_pause = max(self.longest_pause, now - self.last_token)
        self.last_token = now
        self.worker, self.cached_tokens = progress.worker_id, progress.cached_tokens or 0
        return False

    def end(self, outcome: str, now: float) -> None:
        self.outcome, self.ended = outcome, now
        self.on_end(self)


class UniformSpeeds(ClusterSpeeds):
    """Speeds that are the same for all workers, whatever they measure."""

    def refresh(self, speeds: Sequence[WorkerSpeed], now: float) -> None:
        """Compare nothing."""


class Simulation:
    """One run of a workload on a simulated cluster."""

    def __init__(
        self, workload: Workload, setup: Setup, *, counts: Callable[[PlannedRequest], bool] = lambda _: True
    ) -> None:
        self._setup = setup
        self._counts = counts
        self._records: list[Record] = []
        self._requests = workload.requests
        self._followers = {
            request.follows: request for request in workload.requests if request.follows is not None
        }
        self._num_open = len(workload.requests)
        self._windows: list[bool] = []
        self._samples: list[tuple[set[str], set[str]]] = []
        self._loop = VirtualLoop()
        self._over = self._loop.create_future()
        self._network = Network(self._loop, Random(f"network {setup.seed}"), latency_seconds=NETWORK_SECONDS)
        connections = Connections(self._network)
        twin = LateTwin(self._loop.time, self._network.later, setup.index_lag_seconds)
        index = IndexServer(twin, self._network, latency_seconds=INDEX_SECONDS)
        slowness = (*setup.slowness, *[1.0] * setup.num_workers)
        routers = _router_setup(setup)
        transfers = _transfer_network(setup.profile) if setup.pulls else None
        self._workers = [
            WorkerProcess(
                f"worker-{number}", 1, f"worker-{number}:1",
                _worker_setup(setup, slowness[number], transfers), self._loop, connections, index,
                Random(f"worker {number} {setup.seed}"),
                role="prefill" if number < setup.num_prefill_workers else setup.role,
            )
            for number in range(setup.num_workers)
        ]  # fmt: skip
        self._routers = [
            RouterProcess(f"router-{number}", routers, self._loop, connections, index, seed)
            for number in range(setup.num_routers)
            for seed in [Random(f"router {number} {setup.seed}").randrange(2**30)]
        ]
        if setup.has_uniform_speeds:
            for router in self._routers:
                router.fleet.view.speeds = UniformSpeeds(half_life_seconds=0.0)
        self._num_first = setup.num_workers - setup.num_joiners
        self._deal = Random(f"clients {setup.seed}")

    def run(self) -> Result:
        try:
            self._loop.run_until_complete(self._run())
        finally:
            bury(self._loop, [part.process for part in (*self._workers, *self._routers)])
        return self._result()

    async def _run(self) -> None:
        first = self._workers[: self._num_first]
        for worker in first:
            worker.start()
        for router in self._routers:
            router.start([worker.address for worker in first])
        await asyncio.sleep(FIRST_ARRIVAL_SECONDS)
        for router in self._routers:
            assert len(router.fleet.view.ready()) == len(first), "a router misses a worker"
        if len(first) < len(self._workers):
            self._network.later(self._setup.join_seconds, self._join)
        for request in self._requests:
            if request.follows is None:
                self._arrive_after(request.arrival_seconds, request)
        self._network.later(SAMPLE_SECONDS, self._sample)
        await self._over

    def _join(self) -> None:
        for worker in self._workers[self._num_first :]:
            worker.start()
        for router in self._routers:
            router.meet([worker.address for worker in self._workers])

    def _arrive_after(self, seconds: float, request: PlannedRequest) -> None:
        self._network.later(seconds, partial(self._arrive, request))

    def _arrive(self, request: PlannedRequest) -> None:
        record = Record(request=request, arrived=self._loop.time() - START_SECONDS, on_end=self._ended)
        self._records.append(record)
        self._deal.choice(self._routers).accept(_call(request), record)

    def _ended(self, record: Record) -> None:
        if record.outcome != "finished":
            self._over.set_exception(
                RuntimeError(f"request {record.request.number} ended as {record.outcome}")
            )
            return
        self._num_open -= 1
        if not self._num_open:
            self._over.set_result(None)
        follower = self._followers.get(record.request.number)
        if follower is not None:
            self._arrive_after(follower.arrival_seconds, follower)

    def _sample(self) -> None:
        crowded = {worker.address for worker in self._workers if _is_crowded(worker)}
        idle = {worker.address for worker in self._workers if not worker.engine.has_work}
        self._samples.append((crowded, idle))
        if len(self._samples) == SAMPLES_A_WINDOW:
            always_crowded = set.intersection(*(sample[0] for sample in self._samples))
            always_idle = set.intersection(*(sample[1] for sample in self._samples))
            self._windows.append(bool(always_crowded and always_idle))
            self._samples.clear()
        # After the last arrival, no request is left to place on an idle worker.
        if len(self._records) < len(self._requests):
            self._network.later(SAMPLE_SECONDS, self._sample)

    def _result(self) -> Result:
        records = [record for record in self._records if self._counts(record.request)]
        firsts = [record.first_token - record.arrived for record in records]
        latencies = [record.ended - record.arrived for record in records]
        gaps = [
            (latency - first) / (record.request.output.length - 1)
            for record, first, latency in zip(records, firsts, latencies, strict=True)
            if record.request.output.length > 1
        ]
        prompt_tokens = sum(record.request.prompt_tokens for record in records)
        makespan = max(record.ended for record in records) - FIRST_ARRIVAL_SECONDS
        busy = [worker.busy_seconds / makespan for worker in self._workers]
        return Result(
            num_requests=len(records),
            prompt_tokens=prompt_tokens,
            reuse=sum(record.cached_tokens for record in records) / prompt_tokens,
            ideal_reuse=ideal_reuse([r.request for r in records], self._setup.profile.block_size),
            ttft_mean=fmean(firsts),
            ttft_p50=percentile(firsts, 0.5),
            ttft_p90=percentile(firsts, 0.9),
            ttft_p99=percentile(firsts, 0.99),
            token_gap_mean=fmean(gaps) if gaps else 0.0,
            latency_p50=percentile(latencies, 0.5),
            latency_p99=percentile(latencies, 0.99),
            makespan=makespan,
            output_rate=sum(record.request.output.length for record in records) / makespan,
            largest_share=max(Counter(record.worker for record in records).values()) / len(records),
            busy_max=max(busy),
            busy_min=min(busy),
            idle_beside_crowded=fmean(self._windows) if self._windows else 0.0,
            num_refusals=sum(router.placer.num_refusals for router in self._routers),
            num_preemptions=sum(worker.engine.scheduler.num_preemptions for worker in self._workers),
            pulled=self._setup.profile.block_size
            * sum(worker.engine.scheduler.pulls.num_blocks for worker in self._workers)
            / prompt_tokens,
            pause_p50=percentile([record.longest_pause for record in records], 0.5),
            pause_p99=percentile([record.longest_pause for record in records], 0.99),
            num_splits=sum(router.relay.num_splits for router in self._routers),
            adapter_loads=sum(worker.engine.adapters.num_loads for worker in self._workers),
        )


def simulate(
    workload: Workload, setup: Setup, *, counts: Callable[[PlannedRequest], bool] = lambda _: True
) -> Result:
    """Run a workload, and return the result of the requests that count. Raise ValueError if it has no requests."""
    if not workload.requests:
        raise ValueError(f"workload {workload.name} has no requests")
    return Simulation(workload, setup, counts=counts).run()


def ideal_reuse(requests: Sequence[PlannedRequest], block_size: int) -> float:
    """Return the reuse of prompts in this order if all earlier prompts and outputs were cached on every worker."""
    known: set[bytes] = set()
    cached_tokens = prompt_tokens = 0
    for request in requests:
        token_ids = request.token_ids()
        names = chain(ROOT, token_ids, block_size)
        depth = next((at for at, name in enumerate(names) if name not in known), len(names))
        cached_tokens += usable_cached_tokens(depth, len(token_ids), block_size)
        prompt_tokens += len(token_ids)
        output = range(request.output.base, request.output.base + request.output.length)
        known.update(names)
        known.update(
            chain(
                names[-1] if names else ROOT,
                [*token_ids[len(names) * block_size :], *output][:-1],
                block_size,
            )
        )
    return cached_tokens / prompt_tokens


def _transfer_network(profile: HardwareProfile) -> TransferNetwork:
    return TransferNetwork(
        bytes_per_second=profile.link_bytes_per_second, setup_seconds=profile.link_setup_seconds
    )


def _worker_setup(
    setup: Setup, slowness: float, transfers: TransferNetwork | None
) -> WorkerSetup[RooflineRunner]:
    profile = setup.profile
    return WorkerSetup(
        scheduler=SchedulerConfig(
            block_size=profile.block_size,
            max_num_seqs=profile.max_num_seqs,
            max_num_batched_tokens=profile.max_num_batched_tokens,
            max_model_len=profile.max_model_len,
            host_cache_blocks=profile.host_cache_blocks,
            max_loras=setup.max_loras,
            most_lent_blocks=int(EngineConfig(model="none").lend_share * profile.num_blocks),
        ),
        bytes_per_block=profile.block_bytes,
        swap_blocks_per_second=profile.host_bytes_per_second / (2 * profile.block_bytes)
        if profile.host_cache_blocks
        else 0.0,
        transfers=transfers,
        num_blocks=profile.num_blocks,
        make_runner=partial(RooflineRunner, profile=profile, slowness=slowness),
        vocab_size=MAX_TOKEN,
        max_waiting=WorkerConfig(engine=EngineConfig(model="none")).max_waiting,
        mixed_step_seconds=profile.mixed_step_seconds,
        measures_rates=True,
        adapters=tuple(
            Adapter(fingerprint=adapter.fingerprint, rank=adapter.rank, num_bytes=adapter.num_bytes)
            for adapter in map(_adapter, range(setup.num_adapters))
        ),
    )


def _router_setup(setup: Setup) -> RouterSetup:
    """Return a router setup that admits every request, because only placement is measured."""
    return RouterSetup(policy=setup.policy, placement=setup.placement, max_requests=2**31, max_tokens=2**62)


def _call(request: PlannedRequest) -> Call:
    return Call(
        request_id=f"request-{request.number}",
        prompt=request.token_ids(),
        sampling=EngineSampling(
            top_p=1.0, length_penalty=1.0, max_tokens=request.output.length, seed=request.output.base
        ),
        deadline_seconds=DEADLINE_SECONDS,
        session_id=request.session,
        expected_pause_seconds=request.expected_pause_seconds,
        adapter=None if request.adapter is None else _adapter(request.adapter),
    )


def _adapter(number: int) -> RegisteredAdapter:
    return RegisteredAdapter(
        name=f"adapter-{number}", fingerprint=f"{number:032x}", path="", rank=16, num_bytes=ADAPTER_BYTES
    )


def _is_crowded(worker: WorkerProcess[RooflineRunner]) -> bool:
    scheduler = worker.engine.scheduler
    return bool(scheduler.waiting) or len(scheduler.running) >= CROWDED_SEQUENCES
