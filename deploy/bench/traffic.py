"""Sends a plan through the public client and writes down when what came. Owns the clock, and nothing of the numbers.

Closed loop: so many sessions at once, the next when one has ended. Open loop: each begins at its time, whatever the
answers do; a generator that cannot keep up is seen in the samples (`due` against `sent`).
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import cycle

from blockyard.deploy.bench.measures import Sample
from blockyard.deploy.bench.plans import sessions
from blockyard.deploy.bench.requests import PlannedRequest, Workload
from blockyard.deploy.bench.spelling import Spelling
from blockyard.deploy.bench.summaries import Traffic
from blockyard.router.client import AsyncClient, BlockyardError
from blockyard.router.client.arguments import GenerateArguments

Session = Sequence[PlannedRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a plan is sent."""

    concurrency: int | None
    """Sessions at once; None: an open loop."""
    temperature: float = 0.0
    cache_salt: str = ""
    policy: str | None = None
    on_end: Callable[[Sample], None] = field(default=lambda sample: None, repr=False)


async def send(
    clients: Sequence[AsyncClient], workload: Workload, spelling: Spelling, manner: Manner
) -> Traffic:
    """All of it, to the last answer. What fails of a request is in its sample; any other error is raised."""
    sender = _Sender(clients, spelling, manner)
    started = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        if manner.concurrency is None:
            await _open_loop(tasks, sessions(workload), sender, started)
        else:
            waiting = iter(sessions(workload))
            for _ in range(manner.concurrency):
                tasks.create_task(_place(waiting, sender))
    return Traffic(samples=sender.samples, seconds=time.monotonic() - started, unsent=sender.unsent)


async def _open_loop(
    tasks: asyncio.TaskGroup, planned: Sequence[Session], sender: "_Sender", started: float
) -> None:
    for session in planned:
        due = started + session[0].arrival_seconds
        await asyncio.sleep(max(due - time.monotonic(), 0.0))
        tasks.create_task(sender.session(session, due))


async def _place(waiting: Iterator[Session], sender: "_Sender") -> None:
    """One of those that a closed loop has: the sessions that are left are shared by all of them."""
    for session in waiting:
        await sender.session(session, None)


class _Sender:
    def __init__(self, clients: Sequence[AsyncClient], spelling: Spelling, manner: Manner) -> None:
        self._clients = cycle(clients)
        self._spelling = spelling
        self._manner = manner
        self.samples: list[Sample] = []
        self.unsent = 0

    async def session(self, session: Session, due: float | None) -> None:
        """Its turns one after another; the first failure ends it."""
        for turn, request in enumerate(session):
            if turn:
                due = time.monotonic() + request.arrival_seconds
                await asyncio.sleep(request.arrival_seconds)
            sample = await self._request(request, due)
            self.samples.append(sample)
            self._manner.on_end(sample)
            if sample.error:
                self.unsent += len(session) - turn - 1
                return

    async def _request(self, request: PlannedRequest, due: float | None) -> Sample:
        arguments = self._arguments(request)
        tokens: list[int] = []
        sent = time.monotonic()
        sample = Sample(number=request.number, due=sent if due is None else due, sent=sent)
        try:
            async with aclosing(next(self._clients).stream(**arguments)) as deltas:
                async for delta in deltas:
                    if delta.token_ids:
                        sample.arrivals.append(time.monotonic())
                        tokens += delta.token_ids
                    if delta.finish is not None:
                        sample.prompt_tokens = delta.finish.prompt_tokens
                        sample.cached_tokens = delta.finish.cached_tokens
                        sample.worker = delta.finish.worker_id
                        sample.migrations = delta.finish.migrations
        except BlockyardError as error:
            sample.error = error.reason or error.code.name
        sample.output_tokens = len(tokens)
        self._spelling.answered(request.output, tokens)
        return sample

    def _arguments(self, request: PlannedRequest) -> GenerateArguments:
        return {
            "prompt_token_ids": self._spelling.prompt(request),
            "max_tokens": request.output.length,
            "ignore_eos": True,
            "temperature": self._manner.temperature,
            "seed": request.number,
            "cache_salt": self._manner.cache_salt,
            "session_id": f"bench-{request.session}" if request.session else None,
            "policy": self._manner.policy,
        }
