"""Sends a workload to a target, and records when each message arrives. Does not own the summaries.

A session is one request, or the turns of one chat. Closed loop: a fixed number of sessions at once; the next one starts
when one ends. Open loop: each session starts at its planned time, whatever the answers do. If the generator cannot keep
up, `sent` is later than `due` in the samples.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from blockyard.deploy.bench.measures import Sample
from blockyard.deploy.bench.summaries import Traffic
from blockyard.deploy.bench.targets import Ask
from blockyard.deploy.bench.workloads.plans import sessions
from blockyard.deploy.bench.workloads.requests import PlannedRequest, Workload

Session = Sequence[PlannedRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """Timing of a workload's requests. `on_end` gets each sample when its request ends."""

    concurrency: int | None
    """Sessions at once. None means an open loop."""
    on_end: Callable[[Sample], None] = field(default=lambda sample: None, repr=False)


async def send_all(ask: Ask, workload: Workload, manner: Manner) -> Traffic:
    """Send the whole workload and wait for the last answer.

    A failure of a request goes into its sample. Other errors are raised.
    """
    sender = _Sender(ask, manner)
    started = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        if manner.concurrency is None:
            await _open_loop(tasks, sessions(workload), sender, started)
        else:
            waiting = iter(sessions(workload))
            for _ in range(manner.concurrency):
                tasks.create_task(_send_sessions(waiting, sender))
    return Traffic(samples=sender.samples, seconds=time.monotonic() - started, unsent=sender.unsent)


async def _open_loop(
    tasks: asyncio.TaskGroup, planned: Sequence[Session], sender: "_Sender", started: float
) -> None:
    for session in planned:
        due = started + session[0].arrival_seconds
        await asyncio.sleep(max(due - time.monotonic(), 0.0))
        tasks.create_task(sender.session(session, due))


async def _send_sessions(waiting: Iterator[Session], sender: "_Sender") -> None:
    """Send one session after another, as one of the closed loop's tasks. All of them share `waiting`."""
    for session in waiting:
        await sender.session(session, None)


class _Sender:
    def __init__(self, ask: Ask, manner: Manner) -> None:
        self._ask = ask
        self._manner = manner
        self.samples: list[Sample] = []
        self.unsent = 0

    async def session(self, session: Session, due: float | None) -> None:
        """Send the turns one after another, until the first failure."""
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
        send = self._ask(request)
        sent = time.monotonic()
        sample = Sample(
            number=request.number,
            due=sent if due is None else due,
            sent=sent,
            planned_prompt_tokens=request.prompt_tokens,
            planned_output_tokens=request.output.length,
        )
        await send(sample)
        return sample
