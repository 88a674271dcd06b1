"""Speculation of one engine: chooses the drafts of each step by measured times and measured acceptance.

A credit in seconds bounds what wrong drafts cost. A step with drafts adds the time that its right drafts save, less the
time that its rows cost. A step without drafts adds SPENT_SHARE of its time. Without credit there are no drafts. So
however wrong the estimates are, speculation costs little more than SPENT_SHARE of the time. Owns no rows or blocks.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import accumulate

from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.speculation.acceptance import MODEL_CLASS, NUM_CLASSES, Acceptance, Tried, class_of
from blockyard.worker.speculation.choice import can_gain, most_useful, shares
from blockyard.worker.speculation.draft_model import UNGUESSED, DraftModel
from blockyard.worker.speculation.drafter import Drafter, SuffixDrafter
from blockyard.worker.speculation.row_times import RowTimes

MAX_DRAFTS = 15
"""Most drafts of one sequence in one step."""
SPENT_SHARE = 0.005
"""Share of the time that may be spent on drafts which lose."""
MAX_CREDIT_STEPS = 2.0
"""Most credit, in steps without drafts."""
MAX_DRAFTING_STEPS = 16.0
"""Most time of a draft model that one step costs, and most credit that its drafts earn, in steps without drafts."""
MAX_STEPS_WITH_DRAFTS = 32
"""After so many steps with drafts one goes without, so that both kinds stay measured."""
STEPS_A_MEASURED_STEP = 2
"""The same for each measured step of as many rows without drafts. What drafts save is counted by its time."""
TRIAL_STEPS = 16
"""Steps before a trial of drafts that are not expected to gain. Each trial in a row that does not gain doubles them."""
RARE_TRIAL_STEPS = 512
"""The most of them, and their number where not even right drafts would gain, by the times measured."""
LEAST_TRIAL_DRAFTS = 2
TRIAL_SHARE = 0.25
"""Drafts of a trial for each decode. The times of more rows follow from those that trials measure."""
REFUSALS = 4
"""Steps in a row without a right draft after which a sequence rests. Each one more doubles the steps of its rest."""
MAX_REST_STEPS = 256
FORGOTTEN_STEPS = 16
"""Steps without drafts after which a sequence's own rates are forgotten. Otherwise others would get all drafts, because
the rates of a sequence that had bad luck would stay low."""
MAX_SKIPPED_STEPS = 16
"""Most steps after a look for drafts that was in vain, before the next one. With few sequences a look costs little, and
there are no more steps than sequences."""
SURE_MATCH = 6
"""Length of a match from which on what followed it is guessed, although there is a draft model."""


@dataclass(slots=True)
class _Drafted:
    """Record of one sequence's drafts."""

    tried: list[Tried] = field(default_factory=lambda: [Tried() for _ in range(NUM_CLASSES)])
    match_class: int = 0
    """Class of the drafts in flight."""
    num_drafted: int = 0
    num_right: int = 0
    num_refusals: int = 0
    """Steps in a row whose drafts were all wrong."""
    last_step: int = 0
    """Number of the last step that verified any."""
    rests_until: int = 0
    """Number of the step from which it may have drafts again."""


@dataclass(slots=True)
class _Possible:
    """Drafts that a step might verify."""

    sequence: Sequence
    tokens: list[int]
    match_class: int
    odds: list[float]
    """Probability of each that it gives a token."""

    @property
    def is_open(self) -> bool:
        """Whether the draft model is still to make the tokens."""
        return self.match_class == MODEL_CLASS


class Speculation:
    """Drafts of one engine's sequences. Not thread-safe."""

    def __init__(self, drafter: Drafter | None = None, model: DraftModel | None = None) -> None:
        """Without a `drafter`, sequences are searched for what followed their last tokens before. A draft `model`
        guesses where the drafter has no match of SURE_MATCH tokens."""
        self.times = RowTimes()
        self.acceptance = Acceptance()
        self.num_drafted = 0
        """Drafts that were verified since the start."""
        self.num_right = 0
        """Verified drafts that gave a token."""
        self.takes_grammar: Callable[[Sequence], bool] | None = None
        """Returns whether a sequence with a grammar may have drafts. None: no such sequence has any."""
        self._drafter = SuffixDrafter() if drafter is None else drafter
        self._model = model
        self._drafted: dict[SequenceId, _Drafted] = {}
        self._credit_seconds: float | None = None
        """None before the first step was measured."""
        self._steps_with_drafts = 0
        self._num_steps = 0
        self._since_trial = 0
        self._trial_steps = TRIAL_STEPS
        self._is_trial = False
        """Whether the last drafts chosen were a trial."""
        self._looks_in_vain = 0
        """Looks for drafts in a row that found none worth a row."""
        self._skipped_steps = 0
        """Steps before the next look."""
        self._num_right_in_step = 0

    def takes(self, sequence: Sequence) -> bool:
        """Return whether a sequence may have drafts: one that has a token, and neither forks nor searches."""
        if sequence.grammar is not None and (self.takes_grammar is None or not self.takes_grammar(sequence)):
            return False
        return sequence.num_generated > 0 and sequence.group is None and sequence.num_outputs == 1

    def propose(
        self, candidates: Items[tuple[Sequence, int]], *, num_rows: int, most: int
    ) -> list[tuple[Sequence, list[int]]]:
        """Return drafts for some sequences of a step with `num_rows` decodes and no prompt, up to `most` in all.

        `candidates` are sequences with all tokens known, each with the most drafts that it can use.
        """
        chosen, is_trial = self._choose(candidates, num_rows, most)
        for one, _ in chosen:
            self._drafted[one.sequence.sequence_id].match_class = one.match_class
        proposed = [(one.sequence, one.tokens[:count]) for one, count in chosen]
        if self._model is not None:
            # None is left where the model catches up only. Then a trial is still due.
            proposed = self._model.complete(proposed)
        if proposed:
            self._is_trial = is_trial
            self._since_trial = self._looks_in_vain = 0
        else:
            self._looks_in_vain += 1
            self._skipped_steps = min(2**self._looks_in_vain, len(candidates), MAX_SKIPPED_STEPS) - 1
        return proposed

    def is_worth_waiting(self, candidates: Items[tuple[Sequence, int]], *, num_rows: int, most: int) -> bool:
        """Return whether `propose` is expected to find drafts once one more token of each sequence is known."""
        chosen, _ = self._choose(candidates, num_rows, most, num_unseen=1)
        return bool(chosen)

    def _choose(
        self, candidates: Items[tuple[Sequence, int]], num_rows: int, most: int, *, num_unseen: int = 0
    ) -> tuple[list[tuple[_Possible, int]], bool]:
        """Return possible drafts with the number of them to verify, at least one each, and whether they are a trial.

        The first `num_unseen` tokens of each guess are not drafts, because they are about to be known.
        """
        if not candidates or most < 1:
            return [], False
        # How long a step of far more rows takes is not known, so the numbers of rows grow by a factor of two.
        most = min(most, 2 * self.times.most_rows - num_rows, MAX_DRAFTS * len(candidates))
        if self._since_trial < RARE_TRIAL_STEPS and not can_gain(most, num_rows, self.times.expected):
            return [], False
        asks_model = self._asks_model(len(candidates), num_rows, most)
        longest = min(MAX_DRAFTS, 1 + 2 * most // len(candidates))
        possible = [
            one
            for sequence, useful in candidates
            if (one := self._possible(sequence, min(useful, longest), num_unseen, asks_model=asks_model))
        ]
        odds_of = [one.odds for one in possible]
        total = self._most_useful(possible, num_rows, most)
        is_trial = not total and self._since_trial >= self._trial_steps
        if is_trial:
            num_possible = min(sum(map(len, odds_of)), most)
            total = min(max(int(TRIAL_SHARE * num_rows), LEAST_TRIAL_DRAFTS), num_possible)
        counts = shares(odds_of, total)
        return [(one, count) for one, count in zip(possible, counts, strict=True) if count], is_trial

    def _asks_model(self, num_candidates: int, num_rows: int, most: int) -> bool:
        """Return whether drafts of the draft model would gain if all were right. A rare trial asks it in any case."""
        model = self._model
        if model is None or self._since_trial >= RARE_TRIAL_STEPS:
            return model is not None

        def seconds(num_all_rows: int) -> float:
            deepest = -(-(num_all_rows - num_rows) // num_candidates)
            return self.times.expected(num_all_rows) + model.seconds(num_candidates, deepest)

        return can_gain(most, num_rows, seconds)

    def _most_useful(self, possible: list[_Possible], num_rows: int, most: int) -> int:
        """Return how many of the possible drafts gain most, 0 where none are expected to gain."""
        ranked = sorted(
            (
                (odds, -number if one.is_open else 0)
                for one in possible
                for number, odds in enumerate(one.odds, 1)
            ),
            reverse=True,
        )[:most]
        num_open = sum(one.is_open for one in possible)
        deepest = [0, *accumulate((-place for _, place in ranked), max)]

        def seconds(num_all_rows: int) -> float:
            alone = self.times.expected(num_all_rows)
            if self._model is None:
                return alone
            return alone + self._model.seconds(num_open, deepest[num_all_rows - num_rows])

        return most_useful([odds for odds, _ in ranked], num_rows, seconds)

    def may_draft(self, num_rows: int) -> bool:
        """Return whether `propose` is worth calling for a step of so many decodes. Nothing is looked up for that."""
        return (
            self._skipped_steps < 1
            and self._credit_seconds is not None
            and self._credit_seconds > 0
            and self._steps_with_drafts
            < min(STEPS_A_MEASURED_STEP * self.times.num_steps(num_rows), MAX_STEPS_WITH_DRAFTS)
        )

    def _possible(
        self, sequence: Sequence, useful: int, num_unseen: int, *, asks_model: bool
    ) -> _Possible | None:
        drafted = self._drafted.get(sequence.sequence_id)
        if useful < 1 or (drafted is not None and self._num_steps < drafted.rests_until):
            return None
        tokens, match_length = self._drafter.draft(sequence, useful + num_unseen)
        match_class = class_of(match_length)
        if asks_model and self._model is not None and match_length < SURE_MATCH:
            count = self._model.most(sequence, useful + num_unseen)
            if count:
                tokens, match_class = [UNGUESSED] * count, MODEL_CLASS
        del tokens[:num_unseen]
        if not tokens:
            return None
        if drafted is None:
            drafted = self._drafted[sequence.sequence_id] = _Drafted()
        elif self._num_steps - drafted.last_step > FORGOTTEN_STEPS:
            drafted.tried[match_class] = Tried()
        rate = self.acceptance.rate(drafted.tried[match_class], match_class)
        odds = [rate ** (num_unseen + number) for number in range(1, 1 + len(tokens))]
        return _Possible(sequence, tokens, match_class, odds)

    def note(self, sequence: Sequence, *, num_drafted: int, num_right: int) -> None:
        """Note how many drafts of a sequence the step that ends has verified, at least one, and how many were right."""
        self.num_drafted += num_drafted
        self.num_right += num_right
        self._num_right_in_step += num_right
        drafted = self._drafted.get(sequence.sequence_id)
        if drafted is not None:
            drafted.num_drafted += num_drafted
            drafted.num_right += num_right
            drafted.last_step = self._num_steps
            drafted.num_refusals = 0 if num_right else drafted.num_refusals + 1
            if drafted.num_refusals >= REFUSALS:
                rest = min(2 ** (drafted.num_refusals - REFUSALS), MAX_REST_STEPS)
                drafted.rests_until = self._num_steps + 1 + rest
            self.acceptance.note(
                drafted.tried[drafted.match_class],
                drafted.match_class,
                num_drafted=num_drafted,
                num_right=num_right,
            )

    def observe(
        self,
        num_decodes: int,
        num_drafts: int,
        seconds: float,
        *,
        waited_seconds: float = 0.0,
        wasted_seconds: float = 0.0,
    ) -> None:
        """Take the time of a step of decodes alone, at least one, and of so many drafts. Its drafts were noted.

        `waited_seconds` passed before it while it was planned and no step was computed. `wasted_seconds` of them passed
        because drafts were expected, and then there were none.
        """
        num_right, self._num_right_in_step = self._num_right_in_step, 0
        drafting, catching_up = (0.0, 0.0) if self._model is None else self._model.take_seconds()
        if not 0 < seconds < float("inf"):
            return
        # The times of rows do not have the draft model's time.
        waited_seconds = max(0.0, waited_seconds - drafting - catching_up)
        wasted_seconds = max(0.0, wasted_seconds - drafting - catching_up)
        # Catching up has a bound of its own (draft_model.py).
        seconds += waited_seconds
        self._steps_with_drafts = self._steps_with_drafts + 1 if num_drafts else 0
        self._since_trial += 1
        self._skipped_steps -= 1
        self._num_steps += 1
        is_measured = self.times.observe(num_decodes + num_drafts, seconds)
        if not num_drafts and not is_measured:
            return
        alone = self.times.expected(num_decodes) if num_drafts else seconds
        if not alone:
            return
        if num_drafts:
            # First-time work of a size is the drafts' cost too: without them the step would have had another size.
            change = num_right * alone / num_decodes - (seconds - alone)
            self._adjust_trials(gained=change > drafting)
            if self._model is not None and drafting:
                self._model.earn(max(change - drafting, 0.0))
        else:
            change = SPENT_SHARE * seconds - wasted_seconds
        most = MAX_CREDIT_STEPS * alone
        credit = most / 2 if self._credit_seconds is None else self._credit_seconds
        # A pause of the machine is not the drafts' cost.
        change = max(change, -most) - min(drafting, MAX_DRAFTING_STEPS * alone)
        if self._model is not None:
            # Drafts of a model that are all wrong cost several steps. What its right ones saved is kept for that.
            most = max(MAX_DRAFTING_STEPS * alone if drafting and num_drafts else most, credit)
        self._credit_seconds = min(credit + change, most)

    def _adjust_trials(self, *, gained: bool) -> None:
        """Try soon again after drafts that gained. Let more steps pass after each trial that did not."""
        if gained:
            self._trial_steps = TRIAL_STEPS
        elif self._is_trial:
            self._trial_steps = min(2 * self._trial_steps, RARE_TRIAL_STEPS)

    def counts(self, sequence: Sequence) -> tuple[int, int]:
        """Return how many drafts of a sequence were verified, and how many were right."""
        drafted = self._drafted.get(sequence.sequence_id)
        return (0, 0) if drafted is None else (drafted.num_drafted, drafted.num_right)

    def forget(self, ended: Iterable[SequenceId]) -> None:
        """Drop sequences that have ended. Unknown ones are ignored."""
        ended = tuple(ended)
        self._drafter.forget(ended)
        if self._model is not None:
            self._model.forget(ended)
        for sequence_id in ended:
            self._drafted.pop(sequence_id, None)
