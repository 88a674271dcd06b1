"""A router and real workers, which compute the demo model on CPU in deterministic mode."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from blockyard.proto.roles import Role
from blockyard.proto.v1.session_pb2 import PullEnd, PullReport
from blockyard.router.client.aio import AsyncClient
from blockyard.router.cluster.sources import PullLinks
from blockyard.router.cluster.worker_view import WorkerView
from blockyard.router.placement import pulls
from blockyard.router.placement.config import PlacementConfig
from blockyard.router.placement.pulls import Link, PullSource
from blockyard.worker.cache.block_tables import Hits
from blockyard.worker.config import EngineConfig, WorkerConfig
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.server import WorkerServer

from tests.unit.router.fake_worker import SECRET
from tests.unit.router.rig import MODEL, READY, Router, running_router, until
from tests.unit.worker.checkpoints import shared_checkpoint

BLOCK_TOKENS = 16
BLOCK_BYTES = 2 * 3 * 2 * 16 * BLOCK_TOKENS * 4
NUM_BLOCKS = 1200
PROMPT_TOKENS = 100
SIMULATED = {"engine": "simulated", "deterministic": False, "simulated_step_seconds": 0.02}
NO_TIES = PlacementConfig(near_equal_ms=0.0, near_equal_fraction=0.0)
"""A pull that saves any time is taken."""


@pytest.fixture(autouse=True)
def known_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let routers know the links between workers, and let a pull take no time by their estimate.

    On a busy machine an honest estimate may find that computing a short prompt takes less time than a pull.
    """

    class FreeLink(Link):
        def time_ms(self, tokens: int, source: PullSource) -> float:
            return 0.0

    def link(links: PullLinks, worker: WorkerView) -> Link:
        return FreeLink(setup_ms=0.1, bytes_per_ms=2e6, token_bytes=BLOCK_BYTES / BLOCK_TOKENS)

    monkeypatch.setattr(PullLinks, "link", link)
    # Router, workers and clients share two cores with other tests here.
    monkeypatch.setattr(pulls, "PATIENCE_SECONDS", 30.0)


@dataclass
class Starts:
    """Sequences that a worker has admitted, and its pulls."""

    computed: list[tuple[int, int]] = field(default_factory=list)
    """Known tokens of each sequence, and how many of them were to be computed."""
    reports: list[PullReport] = field(default_factory=list)

    def watch(self, worker: WorkerServer) -> None:
        tables, exchange = worker._loaded.engine.scheduler.tables, worker._exchange
        start, on_pull_end = tables.start, exchange._on_pull_end

        def started(sequence: Sequence, hits: Hits) -> None:
            start(sequence, hits)
            known = len(sequence.tokens)
            self.computed.append((known, known - sequence.num_scheduled))

        def pull_ended(request_id: Any, report: PullReport) -> None:
            self.reports.append(report)
            on_pull_end(request_id, report)

        tables.start, exchange._on_pull_end = started, pull_ended  # type: ignore[method-assign]

    @property
    def num_recomputed(self) -> int:
        """Tokens computed again, beyond each sequence's block that is not full."""
        return sum(computed - ((known - 1) % BLOCK_TOKENS + 1) for known, computed in self.computed)


@dataclass
class Cluster:
    router: Router
    client: AsyncClient
    workers: list[WorkerServer]
    starts: list[Starts]

    async def drain(self, number: int, grace_seconds: float = 0.0) -> int:
        return await self.client.drain_worker(f"worker-{number}", grace_seconds=grace_seconds)

    async def stop(self, number: int) -> None:
        """End a worker as SIGTERM does, without a grace."""
        await self.workers.pop(number).stop(0.0)

    async def until_generating(self, num_requests: int, num_tokens: int) -> None:
        async def generating() -> bool:
            known = await self.router.requests()
            return len([one for one in known if one.generated_tokens >= num_tokens]) == num_requests

        await until(generating, 120.0)


def worker(number: int, role: Role = "both", *, redis_url: str | None = None, **engine: Any) -> WorkerServer:
    settings = {
        "model": str(shared_checkpoint("LlamaForCausalLM", vocab_size=4096, max_position_embeddings=2048)),
        "tokenizer": str(MODEL),
        "device": "cpu",
        "deterministic": True,
        "lend_share": 0.005,
        "kv_cache_memory": NUM_BLOCKS * BLOCK_BYTES,
        "host_cache_gib": NUM_BLOCKS * BLOCK_BYTES / 2**30,
    }
    config = EngineConfig(**(settings | engine))
    return WorkerServer(
        WorkerConfig(
            engine=config,
            worker_id=f"worker-{number}",
            role=role,
            cluster_secret=SECRET,
            redis_url=redis_url,
        )
    )


@asynccontextmanager
async def cluster(
    roles: tuple[Role, ...] = ("both", "both"),
    *,
    redis_url: str | None = None,
    tracer_provider: Any = None,
    http_port: int | None = None,
    first: dict[str, Any] | None = None,
    **engine: Any,
) -> AsyncIterator[Cluster]:
    """Run workers and a router. `first` are settings of worker-0 alone."""
    own = [first or {}] + [{}] * len(roles)
    workers = [
        worker(number, role, redis_url=redis_url, **(engine | own[number]))
        for number, role in enumerate(roles)
    ]
    starts = [Starts() for _ in workers]
    async with (
        running_router(
            tracer_provider=tracer_provider,
            http_port=http_port,
            lost_seconds=20.0,
            suspect_seconds=10.0,
            placement=NO_TIES,
            redis_url=redis_url,
        ) as router,
        AsyncClient(router.address) as client,
    ):
        try:
            addresses = [await one.start() for one in workers]
            for one, start in zip(workers, starts, strict=True):
                start.watch(one)
            router.server.set_workers(addresses)

            async def are_ready() -> bool:
                states = await router.states()
                return [states.get(address) for address in addresses] == [READY] * len(roles)

            await until(are_ready, 60.0)
            yield Cluster(router, client, workers, starts)
        finally:
            for one in workers:
                await one.stop(0.0)


def prompt(seed: int, length: int = PROMPT_TOKENS) -> list[int]:
    return [300 + (seed * 97 + position * 31) % 3000 for position in range(length)]


async def ask(client: AsyncClient, seed: int, **changes: Any) -> Any:
    wanted = {
        "max_tokens": 150,
        "ignore_eos": True,
        "seed": seed,
        "prompt_token_ids": prompt(seed, PROMPT_TOKENS + 7 * seed),
    }
    return await client.generate(**(wanted | changes))


def outputs(answer: Any) -> list[tuple[Any, ...]]:
    return [(one.token_ids, one.text, one.logprobs, one.finish.reason) for one in answer.outputs]


async def undisturbed(here: Cluster, asked: list[dict[str, Any]]) -> list[Any]:
    """Return the answers of worker-0 alone, which then forgets them. Worker-1 is drained."""
    await here.drain(1)
    answers = await asyncio.gather(*(ask(here.client, **changes) for changes in asked))
    await here.client.flush_cache()
    return answers


WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 1.0, "regex": "[a-z]{2000}", "ignore_eos": False},
    {"temperature": 1.0, "logit_bias": {500: 5.0}, "bad_token_ids": [501]},
]
"""Whatever a request may ask for: none of it changes where its sequence may go."""
EVERYTHING: dict[str, Any] = {"logprobs": 2, "frequency_penalty": 0.5, "ignore_eos": False}
EVERYTHING |= {"regex": "[a-z]{2000}"}


def has_come_whole(here: Cluster, num_pulls: int) -> bool:
    """Whether worker-1 has fetched all blocks of so many sequences, and computed none of their tokens again."""
    starts = here.starts[1]
    ends = [report.end for report in starts.reports]
    return ends == [PullEnd.PULL_END_WHOLE] * num_pulls and starts.num_recomputed == 0
