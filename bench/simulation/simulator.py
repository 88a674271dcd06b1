"""One run: a workload through routers and workers in virtual time, and what came of it as numbers.

Owns the arrival of requests, the samples of who is idle beside whom, and the arithmetic of the result.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from statistics import fmean
from typing import Any

from blockyard.deploy.bench.requests import PlannedRequest, Workload
from blockyard.proto.block_hash import chain
from blockyard.proto.prefix_index_twin import TwinPrefixIndex
from blockyard.router.cluster_view import usable_cached_tokens
from blockyard.router.placement_config import PlacementConfig, PolicyName
from blockyard.worker.config import EngineConfig, WorkerConfig

from bench.reporting import percentile
from bench.simulation.clock import Events, VirtualClock
from bench.simulation.profile import HardwareProfile
from bench.simulation.routers import Record, SimulatedRouter
from bench.simulation.workers import ROOT, SimulatedWorker

SAMPLE_SECONDS = 0.1
SAMPLES_A_WINDOW = 10
"""One worker crowded and another idle for a whole second is what placement must not let happen."""
CROWDED_SEQUENCES = 8
"""Or any that wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A cluster and how it places."""

    policy: PolicyName = "prefix"
    num_workers: int = 8
    num_routers: int = 1
    seed: int = 0
    profile: HardwareProfile = field(default_factory=HardwareProfile)
    placement: PlacementConfig = field(default_factory=PlacementConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Times in seconds, rates in tokens a second."""

    num_requests: int
    prompt_tokens: int
    reuse: float
    """Share of prompt tokens that came from a cache."""
    ideal_reuse: float
    """The same with one endless cache that knows everything at once."""
    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    token_gap_mean: float
    """Between two tokens of a request, averaged over requests."""
    latency_p50: float
    latency_p99: float
    makespan: float
    output_rate: float
    largest_share: float
    """Of the requests, on the worker that had most."""
    busy_max: float
    """Share of the makespan in which the busiest worker computed."""
    busy_min: float
    idle_beside_crowded: float
    """Share of the seconds, until the last request came, in which one worker was crowded all along while another had
    nothing at all to do."""
    num_refusals: int
    num_preemptions: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Simulation:
    """Built for one run."""

    def __init__(self, workload: Workload, setup: Setup) -> None:
        self._clock = VirtualClock()
        self._events = Events(self._clock)
        self._setup = setup
        self._records: list[Record] = []
        self._requests = workload.requests
        self._followers = {
            request.follows: request for request in workload.requests if request.follows is not None
        }
        self._num_open = len(workload.requests)
        self._windows: list[bool] = []
        self._samples: list[tuple[set[str], set[str]]] = []
        index = TwinPrefixIndex(self._clock)
        max_waiting = WorkerConfig(engine=EngineConfig(model="none")).max_waiting
        self._workers = [
            SimulatedWorker(
                number, setup.profile, self._clock, self._events, index,
                max_waiting=max_waiting,
            )
            for number in range(setup.num_workers)
        ]  # fmt: skip
        self._routers = [
            SimulatedRouter(
                {worker.address: worker for worker in self._workers}, index, self._clock, self._events,
                policy=setup.policy, config=setup.placement, block_size=setup.profile.block_size,
                chance=Random(f"router {number} {setup.seed}"), on_end=self._ended,
            )
            for number in range(setup.num_routers)
        ]  # fmt: skip
        self._deal = Random(f"clients {setup.seed}")

    def run(self) -> Result:
        for request in self._requests:
            if request.follows is None:
                self._arrive_at(request.arrival_seconds, request)
        self._events.at(SAMPLE_SECONDS, self._sample)
        self._events.run()
        assert not self._num_open, f"{self._num_open} requests never ended"
        return self._result()

    def _arrive_at(self, seconds: float, request: PlannedRequest) -> None:
        def arrive() -> None:
            record = Record(request=request, arrived=self._clock.now)
            self._records.append(record)
            self._deal.choice(self._routers).arrive(record)

        self._events.at(seconds, arrive)

    def _ended(self, record: Record) -> None:
        self._num_open -= 1
        follower = self._followers.get(record.request.number)
        if follower is not None:
            self._arrive_at(self._clock.now + follower.arrival_seconds, follower)

    def _sample(self) -> None:
        crowded = {worker.address for worker in self._workers if worker.is_crowded(CROWDED_SEQUENCES)}
        idle = {worker.address for worker in self._workers if worker.is_idle}
        self._samples.append((crowded, idle))
        if len(self._samples) == SAMPLES_A_WINDOW:
            always_crowded = set.intersection(*(sample[0] for sample in self._samples))
            always_idle = set.intersection(*(sample[1] for sample in self._samples))
            self._windows.append(bool(always_crowded and always_idle))
            self._samples.clear()
        # Nothing can be placed on who is idle once the last request has come.
        if len(self._records) < len(self._requests):
            self._events.after(SAMPLE_SECONDS, self._sample)

    def _result(self) -> Result:
        records = self._records
        firsts = [_since(record.arrived, record.first_token) for record in records]
        latencies = [_since(record.arrived, record.ended) for record in records]
        gaps = [
            (latency - first) / (record.request.output.length - 1)
            for record, first, latency in zip(records, firsts, latencies, strict=True)
            if record.request.output.length > 1
        ]
        prompt_tokens = sum(record.request.prompt_tokens for record in records)
        makespan = max(record.ended or 0.0 for record in records)
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
            largest_share=max(worker.num_requests for worker in self._workers) / len(records),
            busy_max=max(busy),
            busy_min=min(busy),
            idle_beside_crowded=fmean(self._windows) if self._windows else 0.0,
            num_refusals=sum(record.num_refusals for record in records),
            num_preemptions=sum(worker.engine.scheduler.num_preemptions for worker in self._workers),
        )


def simulate(workload: Workload, setup: Setup) -> Result:
    """Raises ValueError for a workload without requests."""
    if not workload.requests:
        raise ValueError(f"workload {workload.name} has no requests")
    return Simulation(workload, setup).run()


def ideal_reuse(requests: Sequence[PlannedRequest], block_size: int) -> float:
    """Of prompts in this order, if whatever came before were cached for everybody at once: prompts and outputs."""
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


def _since(start: float, end: float | None) -> float:
    assert end is not None
    return end - start
