"""Scenario of one run: a cluster, requests, faults. A pure function of a seed.

Each fault ends by itself, and all of them before `HEALED_SECONDS`: what comes after is recovery.
"""

import random
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial

from blockyard.proto.roles import Role
from blockyard.proto.v1.session_pb2 import EngineSampling
from blockyard.router.placement.config import PolicyName
from blockyard.worker.scheduling.scheduler import SchedulerConfig
from blockyard.worker.sequences.sampling_params import SamplingParams

from simulation.router_process import Call
from simulation.worker_process import WorkerSetup

from .model import DIGEST_BYTES, VOCABULARY, DigestRunner

BUSY_SECONDS = 5.0
"""Time within which requests and faults begin."""
HEALED_SECONDS = 9.0
NO_WORKER_SECONDS = 2.0
MAX_MIGRATIONS = 3
STOP_TOKENS = (7, 21)
FEWEST_REQUESTS = 6
ROLES: tuple[Role, ...] = ("prefill", "decode", "decode", "both")


class Kind(Enum):
    """A fault. The comments name its target."""

    KILL = auto()  # worker
    HANG = auto()  # worker
    SLOW = auto()  # worker
    DRAIN = auto()  # worker: it takes nothing new, ends, and is started again
    PAUSE = auto()  # worker: drained, and resumed
    FLUSH = auto()  # worker: its cache
    REBUILD = auto()  # worker: republishes all blocks
    MOVE = auto()  # worker: killed, and started at another address
    CUT = auto()  # router, worker
    CUT_UP = auto()  # router, worker
    CUT_DOWN = auto()  # router, worker
    RESET = auto()  # router, worker
    LAG = auto()  # router, worker
    INDEX_DOWN = auto()
    INDEX_HUNG = auto()
    INDEX_FLUSHED = auto()
    INDEX_SLOW = auto()
    INDEX_LOSES_REPLIES = auto()
    KILL_ROUTER = auto()  # router
    PULL_CUT = auto()  # worker: no byte of a transfer passes
    PULL_RESET = auto()  # worker: its transfers end
    PULL_SLOW = auto()  # worker: its link for transfers
    PULL_STUCK = auto()  # worker: its reads of transfers do not end in time
    PULL_HARM = auto()  # worker: some blocks arrive flipped, short, long, doubled or out of order


LIFE_FAULTS = (Kind.KILL, Kind.HANG, Kind.SLOW, Kind.DRAIN, Kind.MOVE)
CARE = (Kind.PAUSE, Kind.FLUSH, Kind.REBUILD)
PATH_FAULTS = (Kind.CUT, Kind.CUT_UP, Kind.CUT_DOWN, Kind.RESET, Kind.LAG)
INDEX_FAULTS = (
    Kind.INDEX_DOWN,
    Kind.INDEX_HUNG,
    Kind.INDEX_FLUSHED,
    Kind.INDEX_SLOW,
    Kind.INDEX_LOSES_REPLIES,
)
PULL_FAULTS = (Kind.PULL_CUT, Kind.PULL_RESET, Kind.PULL_SLOW, Kind.PULL_STUCK, Kind.PULL_HARM)
KINDS = (*LIFE_FAULTS * 2, *PATH_FAULTS * 2, *INDEX_FAULTS, *CARE, Kind.KILL_ROUTER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    at: float
    kind: Kind
    seconds: float
    """Duration. For a kill: time until the next incarnation begins."""
    worker: int
    router: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    number: int
    at: float
    router: int
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    n: int = 1
    beam_width: int = 0
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0
    tenant: str = ""
    deadline_seconds: float = 60.0
    cancel_after: float | None = None
    stop_after: dict[int, int] = field(default_factory=dict)
    """Tokens after which the client's side ends an output, as a stop string does."""

    @property
    def request_id(self) -> str:
        return f"request-{self.number}"

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            seed=self.seed,
            n=self.n,
            beam_width=self.beam_width,
            stop_token_ids=frozenset(self.stop_token_ids),
        )

    def call(self) -> Call:
        return Call(
            request_id=self.request_id,
            prompt=self.prompt,
            sampling=EngineSampling(
                top_p=1.0,
                max_tokens=self.max_tokens,
                seed=self.seed,
                stop_token_ids=self.stop_token_ids,
                n=self.n,
                beam_width=self.beam_width,
                length_penalty=1.0,
            ),
            deadline_seconds=self.deadline_seconds,
            priority=self.priority,
            tenant=self.tenant,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    seed: int
    num_workers: int
    num_routers: int
    setup: WorkerSetup[DigestRunner]
    latency_seconds: float
    jitter_seconds: float
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]
    pulled_blocks_per_second: float = 0.0
    """Rate at which a worker fetches blocks from another one. 0: it does not."""
    policy: PolicyName = "prefix"
    pulls_are_free: bool = False
    """Whether routers estimate that a pull takes no time. The model here computes faster than any link."""
    roles: tuple[Role, ...] = ()
    """Role of each worker. Empty: both."""

    def describe(self) -> str:
        lines = [f"seed {self.seed}: {self.num_workers} workers, {self.num_routers} routers, {self.setup}"]
        lines += [f"  {fault}" for fault in self.faults]
        lines += [f"  {request}" for request in self.requests]
        return "\n".join(lines)


def scenario(seed: int) -> Scenario:
    return drawn(random.Random(f"scenario {seed}"), seed)


def pulling(seed: int) -> Scenario:
    """Return a scenario in which most prompts share a prefix, most workers pull, and most faults strike pulls."""
    chance = random.Random(f"pulls {seed}")
    known = drawn(chance, seed)
    setup = _setup(chance, has_pulls=True)
    setup = replace(setup, scheduler=replace(setup.scheduler, host_cache_blocks=16))
    prefixes = [[chance.randint(1, 9) for _ in range(64)] for _ in range(5)]
    requests = []
    for number in range(24):
        request, prefix = _request(chance, number, 96, prefixes, 1), chance.choice(prefixes)
        depth, rest = chance.choice((16, 48, 64)), request.prompt[-chance.randint(1, 6) :]
        requests.append(
            replace(
                request,
                at=chance.uniform(0.0, BUSY_SECONDS),
                prompt=(*prefix[:depth], *rest),
                max_tokens=min(request.max_tokens, 12),
                beam_width=0,
                cancel_after=chance.uniform(0.0, 0.5) if chance.random() < 0.5 else None,
            )
        )
    faults = [
        Fault(
            at=chance.uniform(0.3, BUSY_SECONDS),
            kind=chance.choice((Kind.KILL, Kind.KILL, Kind.HANG, Kind.FLUSH, *PULL_FAULTS, Kind.PULL_HARM)),
            seconds=chance.choice((0.1, 0.3, 1.2, 3.5)),
            worker=chance.randrange(3),
            router=0,
        )
        for _ in range(chance.choice((1, 3, 6)))
    ]
    return replace(
        known,
        num_workers=3,
        roles=known.roles if len(known.roles) == 3 else (),
        num_routers=1,
        setup=setup,
        requests=tuple(requests),
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
        pulled_blocks_per_second=chance.choice((20.0, 50.0, 200.0)),
        policy="round_robin",
    )


def drawn(chance: random.Random, seed: int) -> Scenario:
    """Draw a scenario from any random source, such as that of hypothesis, which can shrink it. The seed decides events
    within the run."""
    num_workers, num_routers = chance.choice((1, 2, 2, 3, 3)), chance.choice((1, 1, 2))
    pulled_blocks_per_second = chance.choice((0.0, 20.0, 100.0, 1000.0)) if num_workers > 1 else 0.0
    is_crowded = pulled_blocks_per_second >= 100.0 and chance.random() < 0.6
    setup = _setup(chance, has_pulls=pulled_blocks_per_second > 0)
    setup = _crowded(setup) if is_crowded else setup
    num_requests = chance.randint(FEWEST_REQUESTS, 22)
    groups = [[chance.randint(1, 9) for _ in range(64)] for _ in range(3)]
    requests = [
        _request(chance, number, setup.scheduler.max_model_len, groups, num_routers)
        for number in range(num_requests)
    ]
    faults = _faults(chance, num_workers, num_routers, has_pulls=pulled_blocks_per_second > 0)
    if is_crowded:
        requests = [_long(request, chance, setup.scheduler.max_model_len) for request in requests]
        # One worker comes back with an empty pool while the others have too little room.
        back = Fault(at=0.5, kind=Kind.PAUSE, seconds=chance.uniform(0.6, 1.0), worker=0, router=0)
        faults = (back, *(fault for fault in faults if fault.at > 2.0))
    latency_seconds, jitter_seconds = chance.choice((0.0, 0.0005, 0.005)), chance.choice((0.0, 0.0005, 0.01))
    has_pulls = pulled_blocks_per_second > 0 and not is_crowded
    policy: PolicyName = chance.choice(("prefix", "round_robin")) if has_pulls else "prefix"
    has_roles = has_pulls and policy == "prefix" and chance.random() < 0.7
    roles = tuple(chance.choice(ROLES) for _ in range(num_workers)) if has_roles else ()
    return Scenario(
        seed=seed,
        num_workers=num_workers,
        num_routers=num_routers,
        setup=setup,
        latency_seconds=latency_seconds,
        jitter_seconds=jitter_seconds,
        pulls_are_free=is_crowded or has_roles,
        requests=tuple(requests),
        faults=faults,
        pulled_blocks_per_second=pulled_blocks_per_second,
        policy=policy,
        roles=roles,
    )


def _setup(chance: random.Random, *, has_pulls: bool) -> WorkerSetup[DigestRunner]:
    num_blocks = chance.choice((24, 30, 60))
    host_blocks = chance.choice((20, 60) if has_pulls else (0, 0, 20))
    config = SchedulerConfig(
        block_size=4,
        max_num_seqs=chance.choice((4, 8)),
        max_num_batched_tokens=chance.choice((16, 64)),
        max_model_len=96,
        swap_blocks=chance.choice((0, 0, 16)),
        host_cache_blocks=host_blocks,
        index_stride_blocks=chance.choice((1, 1, 2)),
        most_lent_blocks=num_blocks // 2,
    )
    return WorkerSetup(
        scheduler=config,
        num_blocks=num_blocks,
        make_runner=partial(
            DigestRunner,
            block_size=config.block_size,
            step_seconds=chance.choice((0.005, 0.02)),
            prefill_tokens_per_second=chance.choice((500.0, 5000.0)),
        ),
        vocab_size=VOCABULARY,
        max_waiting=chance.choice((2, 4, 16)),
        mixed_step_seconds=0.02,
        lease_seconds=1.0,
        bytes_per_block=config.block_size * DIGEST_BYTES,
        swap_blocks_per_second=10_000.0 if has_pulls else 0.0,
        memory_of=lambda runner: runner,
    )


def _crowded(setup: WorkerSetup[DigestRunner]) -> WorkerSetup[DigestRunner]:
    """Return workers that preempt much, and may fetch blocks."""
    scheduler = replace(
        setup.scheduler, max_num_seqs=8, host_cache_blocks=60, max_num_batched_tokens=64, swap_blocks=0
    )
    return replace(
        setup,
        scheduler=scheduler,
        num_blocks=30,
        swap_blocks_per_second=1000.0,
        max_waiting=16,
    )


def _long(request: Request, chance: random.Random, max_model_len: int) -> Request:
    """Return the request with a long output, at the time of the others."""
    longest = max_model_len - len(request.prompt)
    return replace(
        request,
        at=chance.uniform(0.9, 1.3),
        max_tokens=min(60, longest),
        priority=0,
        n=1 if request.n > 2 else request.n,
        beam_width=0,
        stop_after={},
    )


def _request(
    chance: random.Random, number: int, max_model_len: int, groups: list[list[int]], num_routers: int
) -> Request:
    shared = chance.choice(groups)[: chance.choice((0, 8, 16, 32, 64))]
    # The last token makes each prompt its own: a quarantine of one must not end another.
    prompt = (*shared, *(chance.randint(1, 60) for _ in range(chance.randint(1, 20))), number + 1)
    n = chance.choice((1, 1, 1, 1, 2, 3))
    beam_width = 3 if n == 2 and chance.random() < 0.3 else 0
    longest = max_model_len - len(prompt)
    max_tokens = min(chance.choice((1, 4, 12, 30, 60)), longest)
    if chance.random() < 0.02:
        max_tokens = longest + 1
    has_stop = not beam_width and chance.random() < 0.2
    return Request(
        number=number,
        at=chance.uniform(0.0, BUSY_SECONDS) if chance.random() < 0.7 else 1.0,
        router=chance.randrange(num_routers),
        prompt=prompt,
        max_tokens=max_tokens,
        seed=chance.randint(0, 5),
        n=n,
        beam_width=beam_width,
        stop_token_ids=STOP_TOKENS if chance.random() < 0.2 else (),
        priority=chance.choice((0, 0, 0, 3, -2)),
        tenant=chance.choice(("", "a", "b")),
        deadline_seconds=chance.choice((60.0, 60.0, 60.0, 2.0, 0.3)),
        cancel_after=chance.uniform(0.0, 1.0) if chance.random() < 0.15 else None,
        stop_after={chance.randrange(n): chance.randint(1, 8)} if has_stop else {},
    )


def _faults(
    chance: random.Random, num_workers: int, num_routers: int, *, has_pulls: bool
) -> tuple[Fault, ...]:
    """Return few faults over all the time, or many at once; of all kinds, or of two."""
    start, end = chance.choice(((0.3, BUSY_SECONDS), (0.3, BUSY_SECONDS), (0.9, 1.6)))
    known = (*KINDS, *PULL_FAULTS * 2) if has_pulls else KINDS
    third = (Kind.KILL, Kind.HANG, Kind.FLUSH, *PULL_FAULTS) if has_pulls else KINDS
    kinds = chance.choice((known, third, tuple(chance.sample(known, 2))))
    faults = [
        Fault(
            at=chance.uniform(start, end),
            kind=chance.choice(kinds),
            seconds=chance.choice((0.05, 0.3, 1.2, 3.5, 8.0)),
            worker=chance.randrange(num_workers),
            router=chance.randrange(num_routers),
        )
        for _ in range(chance.choice((0, 2, 4, 6, 10)))
    ]
    return tuple(sorted(faults, key=lambda fault: fault.at))
