"""The load of the soak: users who open clients, ask for streams of known tokens, cancel some, and close the clients.

Owns the users, and the judgement of each stream. Does not own the requests (soak_requests.py), faults (soak_faults.py)
or the state of the cluster (soak_cluster.py). Keeps only the costs of a stream: the soak measures memory.
"""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import grpc
from blockyard.router.client import AsyncClient

from tests.system.load import TIMEOUT_SECONDS, Stream, until

from .invariants import each_ended_once
from .soak_requests import Kind, Tokens, malformed

NUM_USERS = 8
REQUESTS_OF_A_CLIENT = (3, 12)
BETWEEN_SECONDS = (0.0, 0.3)
SENT_SECONDS = 0.005
"""Delay before a cancel, so that a request cancelled before its first token has at least been sent."""
RECONNECT_SECONDS = 5.0
"""Grace after a router's return. Clients find it again within 2 s."""


@dataclass(slots=True, kw_only=True)
class Struck:
    """One fault, and its cost to the streams that it met."""

    kind: str
    target: str
    at: float
    until: float | None = None
    """Time at which the cluster was whole again."""
    whole_seconds: float = 0.0
    """Seconds from the end of the fault until the cluster was whole."""
    failed: int = 0
    migrated: int = 0
    longest_pause: float = 0.0

    def has_met(self, stream: Stream) -> bool:
        assert stream.ended is not None
        return self.at <= stream.ended and (self.until is None or stream.started <= self.until)

    def count(self, stream: Stream, *, has_failed: bool, is_steady: bool) -> None:
        """Count a stream. `is_steady`: its tokens come one by one, so that a gap between them is a pause."""
        self.failed += has_failed
        self.migrated += stream.finish is not None and stream.finish.migrations > 0
        if is_steady:
            times = [stream.started, *stream.arrivals]
            pauses = [
                later - earlier
                for earlier, later in itertools.pairwise(times)
                if later > self.at and (self.until is None or earlier < self.until)
            ]
            self.longest_pause = max([self.longest_pause, *pauses])


@dataclass(slots=True, kw_only=True)
class RouterDeath:
    address: str
    at: float
    back_at: float | None = None

    def explains(self, stream: Stream) -> bool:
        """Return whether this router's death explains the error: no router gave a reason, and this one was down."""
        assert stream.error is not None
        assert stream.ended is not None
        return (
            stream.code is grpc.StatusCode.UNAVAILABLE
            and not stream.reason
            and self.address in str(stream.error)
            and stream.ended >= self.at
            and (self.back_at is None or stream.started <= self.back_at + RECONNECT_SECONDS)
        )


@dataclass(slots=True, kw_only=True)
class SoakLoad:
    """Users beside the faults. Made by `soak_load()`."""

    addresses: Sequence[str]
    seed: int
    kinds: Sequence[Kind]
    references: Mapping[str, Tokens]
    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    struck: list[Struck] = field(default_factory=list)
    router_deaths: list[RouterDeath] = field(default_factory=list)
    _goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    _num_clients: int = 0

    def resume(self) -> None:
        self._goes_on.set()

    async def pause(self) -> None:
        """Return once every stream has ended and every client is closed."""
        self._goes_on.clear()
        await until(
            lambda: self._num_clients == 0, "all streams have ended", seconds=2 * TIMEOUT_SECONDS, every=0.05
        )

    def check(self) -> None:
        assert not self.violations, "\n".join(self.violations)

    async def user(self, number: int) -> None:
        """Run one user without end."""
        chance, requests = random.Random(f"{self.seed}/user/{number}"), itertools.count()
        while True:
            await self._goes_on.wait()
            self._num_clients += 1
            try:
                async with AsyncClient(self.addresses) as client:
                    for _ in range(chance.randint(*REQUESTS_OF_A_CLIENT)):
                        kind = chance.choice(self.kinds)
                        await self.ask(client, kind, f"{kind.name}-{number}-{next(requests)}")
                        await asyncio.sleep(chance.uniform(*BETWEEN_SECONDS))
                        if not self._goes_on.is_set():
                            break
            finally:
                self._num_clients -= 1

    async def ask(self, client: AsyncClient, kind: Kind, request_id: str) -> None:
        """Run one stream to its end, judge it and count it."""
        stream = kind.stream(request_id)
        was_left = False
        if kind.cancel_after_tokens is None:
            await stream.run(client)
        else:
            was_left = await _leave(stream, client, kind.cancel_after_tokens)
        outcome = "left by its client" if was_left else self._outcome(stream, kind)
        self.violations += _untrue(stream, self.references[kind.name], is_whole=outcome == "finished")
        if outcome == "finished" and "json_schema" in kind.arguments:
            self.violations += malformed(stream)
        self.outcomes[outcome] += 1
        met = next((struck for struck in reversed(self.struck) if struck.has_met(stream)), None)
        if met is not None:
            is_steady = "beam_width" not in kind.arguments
            met.count(stream, has_failed=outcome in ("failed", "lost with its router"), is_steady=is_steady)

    def _outcome(self, stream: Stream, kind: Kind) -> str:
        if stream.error is None:
            return "finished"
        if stream.code is grpc.StatusCode.DEADLINE_EXCEEDED and kind.timeout_seconds < TIMEOUT_SECONDS:
            return "past its deadline"
        if any(death.explains(stream) for death in self.router_deaths):
            return "lost with its router"
        told = f"{stream.code.name} {stream.reason} after {stream.num_tokens} tokens: {stream.error}"
        self.violations.append(f"{stream.request_id}: {told}")
        return "failed"


@asynccontextmanager
async def soak_load(
    addresses: Sequence[str], seed: int, wanted: Sequence[Kind], undisturbed: Mapping[str, Tokens]
) -> AsyncIterator[SoakLoad]:
    """Yield a load, paused at first."""
    load = SoakLoad(addresses=addresses, seed=seed, kinds=wanted, references=undisturbed)
    async with asyncio.TaskGroup() as tasks:
        users = [tasks.create_task(load.user(number)) for number in range(NUM_USERS)]
        try:
            yield load
        finally:
            for user in users:
                user.cancel()


async def _leave(stream: Stream, client: AsyncClient, after_tokens: int) -> bool:
    """Cancel the stream once it has that many tokens. Return False if it ended before."""
    running = asyncio.create_task(stream.run(client))
    enough = asyncio.create_task(stream.until_tokens(after_tokens))
    try:
        await asyncio.wait({running, enough}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(SENT_SECONDS)
        has_ended = running.done()
    finally:
        running.cancel()
        enough.cancel()
        await asyncio.gather(enough, return_exceptions=True)
        with suppress(asyncio.CancelledError):
            await running
    return not has_ended


def _untrue(stream: Stream, reference: Tokens, *, is_whole: bool) -> list[str]:
    """Return the violations of the invariants in a stream."""
    found = []
    try:
        each_ended_once([stream])
    except AssertionError:
        late = (stream.ended or time.monotonic()) - stream.started
        found.append(f"ended after {late:.1f} s of {stream.timeout_seconds:g} s with {stream.code.name}")
    if is_whole and stream.tokens.keys() != reference.keys():
        found.append(f"has outputs {sorted(stream.tokens)} of {sorted(reference)}")
    for index, tokens in stream.tokens.items():
        wanted = reference[index] if is_whole else reference[index][: len(tokens)]
        if tokens != wanted:
            pairs = enumerate(zip(tokens, wanted, strict=False))
            at = next((at for at, (token, other) in pairs if token != other), len(tokens))
            found.append(f"output {index} leaves the undisturbed run at token {at} of {len(wanted)}")
    return [f"{stream.request_id}: {each}" for each in found]
