"""Real workers of which one computes prompts and another decodes: each request moves after its first tokens.

No token changes by that, whatever the request asks for. The workers compute the demo model on CPU, in deterministic
mode.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from blockyard.proto.v1.session_pb2 import PullEnd
from blockyard.router.placement import rates

from tests.unit.router.rig import until

from .rig import WISHES, Cluster, ask, cluster, known_links, outputs, prompt

__all__ = ["known_links"]
LONG = 700
"""Tokens of a long prompt, which a `decode` worker leaves to others."""


@pytest.fixture(autouse=True)
def equal_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let routers take no worker to be slower than another: these share two cores, where a pause makes one seem slow.

    Where ties do not count and links are free, as here, a short prompt is rightly split before a slow worker.
    """
    monkeypatch.setattr(rates, "shrunk", lambda difference, num_rows: 0.0)


async def answers_of(here: Cluster, asked: list[dict[str, Any]]) -> list[Any]:
    known = [
        {"max_tokens": 40, "prompt_token_ids": prompt(seed, LONG + 7 * seed)} for seed in range(len(asked))
    ]
    return await asyncio.gather(
        *(ask(here.client, **own | changes) for own, changes in zip(known, asked, strict=True))
    )


@asynccontextmanager
async def two_workers() -> AsyncIterator[Cluster]:
    """Yield a `prefill` and a `decode` worker that have measured their links. A late trial would keep them apart."""
    async with cluster(("prefill", "decode")) as here:

        async def are_measured() -> bool:
            return all(worker.load.pull_bytes_per_second for worker in await here.client.list_workers())

        await until(are_measured, 120.0)
        yield here


async def undisturbed(asked: list[dict[str, Any]]) -> list[Any]:
    """Return the answers of one worker of role `both`."""
    async with cluster(("both",)) as here:
        return await answers_of(here, asked)


async def test_a_split_request_gets_the_same_tokens_whatever_it_asks_for() -> None:
    further = [{"temperature": 1.0, "n": 3}, {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 0}]
    asked = [{"seed": seed, **changes} for seed, changes in enumerate([*WISHES, *further])]
    expected = await undisturbed(asked)
    async with two_workers() as here:
        answers = await answers_of(here, asked)
        assert [outputs(answer) for answer in answers] == [outputs(answer) for answer in expected]
        assert {answer.finish.migrations for answer in answers} == {0}, "a planned move counts as no failure"
        assert (await here.client.cluster_info()).splits == len(asked)
        assert {report.end for report in here.starts[1].reports} == {PullEnd.PULL_END_WHOLE}
        assert here.starts[1].num_recomputed == 0


async def test_beams_and_short_prompts_are_not_split() -> None:
    short: dict[str, Any] = {"prompt_token_ids": prompt(1, 60), "seed": 1}
    beams: dict[str, Any] = {"seed": 2, "beam_width": 2, "n": 2, "max_tokens": 8}
    beams |= {"prompt_token_ids": prompt(2, LONG)}
    expected = await undisturbed([short, beams])
    async with two_workers() as here:
        # One after the other: behind the beams' prompt, a short one would be split.
        answers = [(await answers_of(here, [changes]))[0] for changes in (short, beams)]
        assert here.starts[0].computed == []
        assert (await here.client.cluster_info()).splits == 0
        assert [outputs(answer) for answer in answers] == [outputs(answer) for answer in expected]


async def test_a_prefill_worker_serves_whole_requests_while_it_is_alone() -> None:
    asked: list[dict[str, Any]] = [{"seed": 1}]
    (expected,) = await undisturbed(asked)
    async with two_workers() as here:
        await here.drain(1)
        (answer,) = await answers_of(here, asked)
        assert outputs(answer) == outputs(expected)
        assert answer.finish.worker_id == "worker-0"
        assert (await here.client.cluster_info()).splits == 0


async def test_explain_shows_the_terms_of_a_split() -> None:
    async with two_workers() as here:
        explained = await here.client.explain_placement(prompt_token_ids=prompt(1, LONG))
        split = explained.split
        assert explained.chosen_worker_id == split.prefill.worker_id == "worker-0"
        assert (split.is_chosen, split.local_ms) == (True, 0.0)
        assert (split.decode.worker_id, split.decode.pulled_from) == ("worker-1", "worker-0")
        assert split.decode.pulled_tokens == LONG // 16 * 16
        assert split.split_ms == split.prefill.total_ms + split.decode.total_ms
        assert [worker.role for worker in await here.client.list_workers()] == ["prefill", "decode"]
