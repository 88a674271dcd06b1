"""Sessions on real processes. The next turn finds every full block of an answer, over HTTP and gRPC and by
another router.

It does so too where a drained worker has handed the answer over to another one.
"""

import asyncio
import itertools
import re
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from blockyard.router.client import AsyncClient
from openai import AsyncOpenAI

from tests.system.load import until_ready
from tests.system.processes import SIMULATED, Process, Processes, processes

from .rig import gateway_of

BLOCK_SIZE = 16
LATE = re.compile(
    r"^blockyard_(?:answer_store_failures|index_failed_lookups|index_skipped_lookups)\S* (\S+)$", re.MULTILINE
)
OPTIONS = {"temperature": 1.0, "max_tokens": 70}
"""A simulated engine samples any token, so its text often has other tokens in its tokenizer."""


@dataclass(frozen=True)
class Turn:
    prompt_tokens: int
    num_generated: int
    cached_tokens: int
    worker_id: str

    def check_reused_by(self, following: "Turn") -> None:
        """Check that the next turn has found all full blocks of this one's prompt and answer. The answer's last token
        was not computed by the step that sampled it."""
        full = (self.prompt_tokens + self.num_generated - 1) // BLOCK_SIZE
        assert following.cached_tokens // BLOCK_SIZE >= full, (self, following)


class Talk:
    """One conversation, whose turns any router serves over any protocol."""

    def __init__(self, number: int, *, session: bool = True) -> None:
        name = f"talk-{number}-{session}"
        self.options: dict[str, Any] = {"cache_salt": name, **({"session_id": name} if session else {})}
        self.messages: list[Any] = [{"role": "user", "content": f"Write the function number {number}."}]
        self.seed = number

    async def over_grpc(self, router: Process) -> Turn:
        async with AsyncClient(router.address) as client:
            answer = await client.generate(messages=self.messages, seed=self.seed, **OPTIONS, **self.options)
        output = answer.outputs[0]
        self.go_on(output.text)
        finish = output.finish
        return Turn(finish.prompt_tokens, len(output.token_ids), finish.cached_tokens, finish.worker_id)

    async def over_http(self, router: Process) -> Turn:
        async with AsyncOpenAI(base_url=f"{gateway_of(router)}/v1", api_key="none", max_retries=0) as client:
            answer = await client.chat.completions.create(
                model="demo", messages=self.messages, seed=self.seed, extra_body=self.options, **OPTIONS
            )
        (choice,), usage = answer.choices, answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        self.go_on(choice.message.content or "")
        cached = usage.prompt_tokens_details.cached_tokens or 0
        return Turn(usage.prompt_tokens, usage.completion_tokens, cached, choice.model_dump()["worker_id"])

    def go_on(self, text: str) -> None:
        self.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
        self.seed += 1


async def num_late(cluster: Processes) -> float:
    """Return how often Redis was not there in time for the routers. Their readings are at most a second old."""
    await asyncio.sleep(1.5)
    late = 0.0
    for router in cluster.routers.values():
        text = await asyncio.to_thread(
            lambda url: urllib.request.urlopen(url).read(), f"{gateway_of(router)}/metrics"
        )
        late += sum(float(value) for value in LATE.findall(text.decode()))
    return late


async def in_time(cluster: Processes, attempt: Callable[[int], Awaitable[None]]) -> None:
    """Run an attempt until it succeeds. It may fail only where Redis was late, as on a busy machine."""
    for number in itertools.count():
        before = await num_late(cluster)
        try:
            return await attempt(number)
        except AssertionError:
            if await num_late(cluster) == before:
                raise


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("faithful"), with_redis=True) as running:
        for name in ("w0", "w1"):
            running.add_worker(name, *SIMULATED)
        for name in ("r0", "r1"):
            running.add_router(name, "--http-port", "0")
        running.start(*running.workers.values(), *running.routers.values())
        yield running


async def all_ready(cluster: Processes, *workers: str) -> None:
    for router in cluster.routers.values():
        async with AsyncClient(router.address) as client:
            await until_ready(client, *workers)


async def test_every_full_block_of_an_answer_is_found_again(cluster: Processes) -> None:
    await all_ready(cluster, "w0", "w1")
    one, other = cluster.routers.values()

    async def attempt(number: int) -> None:
        talk = Talk(number)
        turns = [await talk.over_http(one), await talk.over_grpc(one), await talk.over_http(other)]
        turns.append(await talk.over_grpc(other))
        for turn, following in pairwise(turns):
            turn.check_reused_by(following)

    await in_time(cluster, attempt)
    plain = Talk(0, session=False)
    with pytest.raises(AssertionError):
        (await plain.over_http(one)).check_reused_by(await plain.over_grpc(one))


async def test_an_answer_that_moved_in_the_middle_is_found_again(cluster: Processes) -> None:
    """The first worker is drained while it generates. The other one fetches its blocks and continues."""
    await all_ready(cluster, "w0", "w1")
    await in_time(cluster, lambda number: answer_that_moves(cluster, Talk(100 + number)))


async def answer_that_moves(cluster: Processes, talk: Talk) -> None:
    router = cluster.routers["r0"]
    sampled: list[int] = []
    async with AsyncClient(router.address) as client:
        stream = client.stream(
            messages=talk.messages, seed=1, max_tokens=300, ignore_eos=True, **talk.options
        )
        text, home = "", ""
        async for delta in stream:
            sampled += delta.token_ids
            text += delta.text
            if not home and len(sampled) > 40:
                (home,) = [info.worker_id for info in await client.list_requests()]
                await client.drain_worker(home, grace_seconds=0)
            finish = delta.finish
        assert finish is not None
        turn = Turn(finish.prompt_tokens, len(sampled), 0, finish.worker_id)
        assert turn.worker_id != home
        talk.go_on(text)
        try:
            turn.check_reused_by(await talk.over_http(cluster.routers["r1"]))
        finally:
            await client.resume_worker(home)


async def test_after_the_loss_of_a_worker_the_same_tokens_are_computed_once_more(cluster: Processes) -> None:
    """No worker has the blocks then. The second turn computes them, and the third finds all of them."""
    await all_ready(cluster, "w0", "w1")
    await in_time(cluster, lambda number: answer_that_is_lost(cluster, Talk(200 + number)))


async def answer_that_is_lost(cluster: Processes, talk: Talk) -> None:
    one, other = cluster.routers.values()
    first = await talk.over_grpc(one)
    home = cluster.workers[first.worker_id]
    home.kill()
    try:
        await all_ready(cluster, *cluster.workers.keys() - {home.name})
        second = await talk.over_http(one)
        assert second.worker_id != first.worker_id
        assert second.cached_tokens == 0, "the salt is the talk's own"
        second.check_reused_by(await talk.over_grpc(other))
    finally:
        home.spawn()
        home.await_address()
    await all_ready(cluster, "w0", "w1")
