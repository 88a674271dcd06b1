"""Real workers of which one computes prompts and another decodes: each request moves after its first tokens.

No token changes by that, whatever the request asks for. The workers compute the demo model on CPU, in deterministic
mode.
"""

import asyncio
from typing import Any

from blockyard.proto.v1.session_pb2 import PullEnd

from .test_handover import Cluster, ask, cluster, known_links, outputs, prompt

__all__ = ["known_links"]
LONG = 700
"""Tokens of a long prompt, which a `decode` worker leaves to others."""


async def answers_of(here: Cluster, asked: list[dict[str, Any]]) -> list[Any]:
    return await asyncio.gather(
        *(
            ask(
                here.client, **{"max_tokens": 40, "prompt_token_ids": prompt(seed, LONG + 7 * seed)} | changes
            )
            for seed, changes in enumerate(asked)
        )
    )


async def undisturbed(asked: list[dict[str, Any]]) -> list[Any]:
    """Return the answers of one worker of role `both`."""
    async with cluster(("both",)) as here:
        return await answers_of(here, asked)


async def test_a_split_request_gets_the_same_tokens_whatever_it_asks_for() -> None:
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 1.0, "logprobs": 3},
        {"temperature": 1.0, "regex": "[a-z]{2000}", "ignore_eos": False},
        {"temperature": 1.0, "logit_bias": {500: 5.0}, "bad_token_ids": [501]},
        {"temperature": 1.0, "n": 3},
        {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 0},
    ]
    asked = [{"seed": seed, **changes} for seed, changes in enumerate(asked)]
    expected = await undisturbed(asked)
    async with cluster(("prefill", "decode")) as here:
        answers = await answers_of(here, asked)
        assert [outputs(answer) for answer in answers] == [outputs(answer) for answer in expected]
        assert {answer.finish.migrations for answer in answers} == {0}, "a planned move counts as no failure"
        assert (await here.client.cluster_info()).splits == len(asked)
        assert {report.end for report in here.starts[1].reports} == {PullEnd.PULL_END_WHOLE}
        assert here.starts[1].num_recomputed == 0
