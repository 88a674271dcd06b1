"""Splits: which workers may serve a whole request, and whether one should begin it and another continue it.

A split request goes to a worker of role `prefill`. That worker computes the prompt, sends the first tokens and gives
the request back. Then the request is placed again, on a worker that fetches the blocks from the first one.

    split_ms = total_ms of the first worker + total_ms of the second one, which computes only the block that is not full

A whole prompt delays the sequences that run beside it (`interference_ms`). On a `prefill` worker none run, so a split
costs less where its other terms are smaller than that delay. Without `prefill` workers there are no splits.

Pure. Does not own the terms (scoring.py), or the choice among the workers that may serve a request (policies.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

from blockyard.router.placement.config import PlacementConfig
from blockyard.router.placement.pulls import LEAST_GAIN, PullSource
from blockyard.router.placement.scoring import Candidate, Score, best_score, tie_ms

LONG_PROMPT_TOKENS = 512
"""A prompt with more tokens to compute is long. `decode` workers leave it to others. Beside decodes, a CPU computes
fewer tokens than this in one step of the default length."""


class Beginner(NamedTuple):
    """A worker of role `prefill`."""

    candidate: Candidate
    source: PullSource
    """The worker as the source of the whole prompt."""


class Split(NamedTuple):
    """The cheapest way to begin a request on one worker and to continue it on another."""

    prefill: Score
    """The worker that computes the prompt."""
    decode: Score
    """The worker that continues, as it seems now. It is chosen again after the first tokens."""
    local_ms: float | None
    """total_ms of the worker that would serve the whole request. None: none may."""
    is_chosen: bool

    @property
    def split_ms(self) -> float:
        return self.prefill.total_ms + self.decode.total_ms


def able(prompt_tokens: int, candidates: Sequence[Candidate], *, is_continued: bool) -> Sequence[Candidate]:
    """Return the candidates that may serve a whole request. If the result is empty, any may serve it after all.

    A `prefill` worker may not. A `decode` worker may not compute a long prompt, except of a request that `is_continued`
    there after another worker gave it back.
    """
    if all(candidate.role == "both" for candidate in candidates):
        return candidates
    return [
        candidate
        for candidate in candidates
        if candidate.role == "both"
        or (candidate.role == "decode" and (is_continued or not _is_long(prompt_tokens, candidate)))
    ]


def _is_long(prompt_tokens: int, candidate: Candidate) -> bool:
    cached_tokens = candidate.cached_tokens + candidate.host_cached_tokens
    return prompt_tokens - cached_tokens > LONG_PROMPT_TOKENS


def best_split(
    prompt_tokens: int,
    beginners: Sequence[Beginner],
    candidates: Sequence[Candidate],
    config: PlacementConfig,
    sources: Sequence[PullSource],
    *,
    local: Score | None,
) -> Split | None:
    """Return the split of the cheapest beginner and the cheapest worker after it, or None where there is none.

    `local` is the score of the worker that would serve the whole request. A split is chosen if it costs less by more
    than the estimates may be wrong. The second worker must gain by the pull: it fetches the blocks or computes them
    again.
    """
    if not beginners:
        return None
    scores = [best_score(prompt_tokens, beginner.candidate, config, sources) for beginner in beginners]
    first = min(range(len(scores)), key=lambda number: scores[number].cost)
    continuing = [
        score
        for candidate in candidates
        if candidate.role != "prefill"
        for score in [_continuing(prompt_tokens, candidate, beginners[first].source, config)]
        if score is not None
    ]
    if not continuing:
        return None
    decode = min(continuing, key=lambda score: score.cost)
    split = Split(scores[first], decode, None, is_chosen=True)
    if local is None:
        return split
    assert decode.pull is not None, "it continues by a pull"
    doubt_ms = max(tie_ms(local.total_ms, config), LEAST_GAIN * decode.pull.time_ms)
    is_chosen = local.total_ms - split.split_ms > doubt_ms
    return split._replace(local_ms=local.total_ms, is_chosen=is_chosen)


def _continuing(
    prompt_tokens: int, candidate: Candidate, source: PullSource, config: PlacementConfig
) -> Score | None:
    """Return the score of continuing after the first token. None where the worker would not fetch the blocks.

    Pulled tokens delay nobody here: wherever the request decodes, its blocks take the same room.
    """
    score = best_score(prompt_tokens + 1, candidate, config, [source])
    if score.pull is None:
        return None
    weight = config.later_fraction + config.others_fraction * candidate.sequences
    score = score._replace(interference_ms=weight * score.prefill_ms)
    return score._replace(cost=score.total_ms)
