"""Beam search over sequences that the scheduler runs: which beams continue, which are finished, when the search ends.

Pure bookkeeping of scores. A beam's row brings its most probable next tokens. Once every running beam has brought
them, `advance` returns the next beams. Does not own sequences' blocks or tokens: the scheduler forks and drops them.

The rules are those of transformers (`GenerationMixin._beam_search` of version 5), so the results are equal. Of the
continuations of all beams, the best `beam_width` may finish. The best `beam_width` that do not end continue.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import FinishReason, Sequence

Candidate = tuple[int, float]
"""A token, and its log-probability as the next one of a beam."""


def num_candidates(sampling: SamplingParams) -> int:
    """Return how many next tokens of each beam a step considers: enough that `beam_width` of them do not end."""
    return sampling.beam_width + len(sampling.eos_token_ids | sampling.stop_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A finished beam."""

    token_ids: tuple[int, ...]
    """Generated tokens, an end token included."""
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason
    stop_token: int | None


@dataclass(frozen=True, slots=True)
class NextBeam:
    """A beam that continues: a parent and the token after it."""

    parent: Sequence
    token: int
    cumulative_logprob: float


class BeamGroup:
    """One search. `live` are its running beams."""

    def __init__(self, leader: Sequence) -> None:
        self.sampling = leader.sampling
        self.live: list[Sequence] = [leader]
        self._logprobs: dict[SequenceId, float] = {leader.sequence_id: 0.0}
        self._candidates: dict[SequenceId, Items[Candidate]] = {}
        self._finished: list[Hypothesis] = []

    @property
    def width(self) -> int:
        return self.sampling.beam_width

    def waits(self, beam: Sequence) -> bool:
        """Return whether the beam has brought its candidates, and waits for the others'."""
        return beam.sequence_id in self._candidates

    def offer(self, beam: Sequence, candidates: Items[Candidate]) -> bool:
        """Take a beam's most probable tokens, and return whether all beams have brought theirs."""
        self._candidates[beam.sequence_id] = candidates
        return len(self._candidates) == len(self.live)

    def forget_candidates(self) -> None:
        """Drop all candidates: after a preemption all beams compute their last position again."""
        self._candidates.clear()

    def advance(self) -> list[NextBeam]:
        """Finish the beams that end, and return those that continue: none where the search has ended."""
        ranked = sorted(
            (
                NextBeam(beam, token, self._logprobs[beam.sequence_id] + logprob)
                for beam in self.live
                for token, logprob in self._candidates[beam.sequence_id]
                if logprob > float("-inf")
            ),
            key=lambda following: -following.cumulative_logprob,
        )
        self._candidates.clear()
        self._finish(ranked[: self.width])
        following = [beam for beam in ranked if self._reason(beam) is None][: self.width]
        return following if following and self._may_improve(following[0]) else []

    def go_on(self, beams: Items[tuple[Sequence, float]]) -> None:
        """Run these beams from now on, each with the log-probability of its tokens so far."""
        self.live = [beam for beam, _ in beams]
        self._logprobs = {beam.sequence_id: logprob for beam, logprob in beams}

    def best(self) -> list[Hypothesis]:
        """Return the `n` best finished beams, the best first."""
        return self._finished[: self.sampling.n]

    def _finish(self, ranked: Items[NextBeam]) -> None:
        for beam in ranked:
            reason = self._reason(beam)
            if reason is None:
                continue
            token_ids = (*beam.parent.tokens[beam.parent.prompt_length :], beam.token)
            self._finished.append(
                Hypothesis(
                    token_ids=token_ids,
                    cumulative_logprob=beam.cumulative_logprob,
                    score=beam.cumulative_logprob / len(token_ids) ** self.sampling.length_penalty,
                    finish_reason=reason,
                    stop_token=beam.token if reason is FinishReason.STOP else None,
                )
            )
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[self.width :]

    def _reason(self, beam: NextBeam) -> FinishReason | None:
        num_generated = beam.parent.num_generated + 1
        ends = beam.token in self.sampling.eos_token_ids or beam.token in self.sampling.stop_token_ids
        if ends and num_generated >= self.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_generated >= self.sampling.max_tokens else None

    def _may_improve(self, best: NextBeam) -> bool:
        """Return whether running beams might yet beat the worst of the finished ones."""
        if len(self._finished) < self.width:
            return True
        match self.sampling.early_stopping:
            case "first":
                return False
            case "never" if self.sampling.length_penalty > 0:
                length = self.sampling.max_tokens
            case "never" | "heuristic":
                length = best.parent.num_generated + 1
        hoped_for: float = best.cumulative_logprob / length**self.sampling.length_penalty
        return hoped_for > self._finished[-1].score
