"""Spells runs of tokens as ids of a vocabulary, or as words. Equal runs are spelled alike; others share only by chance.

A model's real answer replaces the planned output, so that a conversation continues with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from blockyard.deploy.bench.workloads.requests import PlannedRequest, Run

WORDS = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law car city community name president team minute idea
body information back parent face others level office door health person art war history party result change
morning reason research girl guy moment air teacher force education foot boy age policy process music market
sense nation plan college interest death experience effect use class control field development role effort
rate heart drug show leader light voice wife police mind price report decision son view relationship town road
arm difference value building action season society tax director position player record paper space ground
form event matter center couple site project activity star table need court oil situation cost industry figure
street image phone data picture practice piece land product doctor wall patient worker news test movie north
love support technology step baby computer type film tree source
""".split()  # noqa: SIM905
"""Common English words. With a space before it, each is one token in most vocabularies."""


class Spelling:
    """Spells runs as token ids, which are drawn before any request is sent, so that they add to no latency."""

    def __init__(self, requests: Iterable[PlannedRequest], *, vocab_size: int, seed: int | str) -> None:
        vocabulary = range(vocab_size)
        self._ids = {
            base: array("i", Random(f"{seed} {base}").choices(vocabulary, k=length))
            for base, length in _longest(requests).items()
        }
        self._answers: dict[int, array[int]] = {}

    def answered(self, output: Run, token_ids: Sequence[int]) -> None:
        self._answers[output.base] = array("i", token_ids)

    def prompt(self, request: PlannedRequest) -> array[int]:
        prompt = array("i")
        for run in request.prompt:
            prompt += self._answers.get(run.base) or self._ids[run.base][: run.length]
        return prompt


@dataclass(frozen=True, slots=True)
class Said:
    """Consecutive words of one speaker."""

    role: Literal["user", "assistant"]
    text: str


class WordSpelling:
    """Spells runs as text, one word per token, for a server with an unknown vocabulary.

    Most models encode each of these words as one token.
    """

    def __init__(self, requests: Iterable[PlannedRequest], *, seed: int | str) -> None:
        self._words = {
            base: Random(f"{seed} {base}").choices(WORDS, k=length)
            for base, length in _longest(requests).items()
        }
        self._answers: dict[int, str] = {}

    def answered(self, output: Run, text: str) -> None:
        self._answers[output.base] = text

    def prompt(self, request: PlannedRequest) -> str:
        return "".join(said.text for said in self.messages(request))

    def messages(self, request: PlannedRequest) -> list[Said]:
        """Return messages by turns, the user first. The model's answers become messages of the assistant."""
        found: list[Said] = []
        for run in request.prompt:
            answer = self._answers.get(run.base)
            words = "".join(f" {word}" for word in self._words[run.base][: run.length])
            said = Said("user", words) if answer is None else Said("assistant", answer)
            if found and found[-1].role == said.role:
                said = Said(said.role, found.pop().text + said.text)
            found.append(said)
        return found


def _longest(requests: Iterable[PlannedRequest]) -> dict[int, int]:
    """Return the length of the longest run of each base in any prompt."""
    lengths: dict[int, int] = {}
    for request in requests:
        for run in request.prompt:
            lengths[run.base] = max(lengths.get(run.base, 0), run.length)
    return lengths
