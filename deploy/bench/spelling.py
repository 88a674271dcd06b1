"""Runs of tokens as ids of a model's vocabulary: equal runs are equal ids, others share nothing but by chance.

What a model has answered takes the place of the planned output, so that a conversation goes on with its real words.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from random import Random

from blockyard.deploy.bench.requests import PlannedRequest, Run


class Spelling:
    """Drawn before anything is sent: what it takes is in no latency."""

    def __init__(self, requests: Iterable[PlannedRequest], *, vocab_size: int, seed: int) -> None:
        lengths: dict[int, int] = {}
        for request in requests:
            for run in request.prompt:
                lengths[run.base] = max(lengths.get(run.base, 0), run.length)
        vocabulary = range(vocab_size)
        self._ids = {
            base: array("i", Random(f"{seed} {base}").choices(vocabulary, k=length))
            for base, length in lengths.items()
        }
        self._answers: dict[int, array[int]] = {}

    def answered(self, output: Run, token_ids: Sequence[int]) -> None:
        self._answers[output.base] = array("i", token_ids)

    def prompt(self, request: PlannedRequest) -> array[int]:
        prompt = array("i")
        for run in request.prompt:
            prompt += self._answers.get(run.base) or self._ids[run.base][: run.length]
        return prompt
