"""When a draft model works, in virtual time: it gains where its passes are cheap, and costs little where not."""

import random
from collections.abc import Iterable
from collections.abc import Sequence as Items

import pytest
from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.sequence import Sequence
from blockyard.worker.speculation.choice import most_useful
from blockyard.worker.speculation.model_drafts import ModelDrafts
from blockyard.worker.speculation.speculation import Speculation

from .scheduling import make_sequence


class VirtualModel:
    """A draft model whose passes take `a_pass` seconds of a clock of its own, and each token of a prompt `a_token`."""

    def __init__(self, a_pass: float, a_token: float = 0.0, prompt_tokens: int = 0) -> None:
        self.now = 0.0
        self._a_pass = a_pass
        self._a_token = a_token
        self._prompt_tokens = prompt_tokens
        self._lags: dict[SequenceId, int] = {}
        self.fails = False
        self.forgotten: list[SequenceId] = []

    def lag(self, sequence: Sequence) -> int | None:
        return 1 + self._lags.setdefault(sequence.sequence_id, self._prompt_tokens)

    def catch_up(self, sequences: Iterable[Sequence], most: int) -> None:
        for sequence in sequences:
            count = min(most, self._lags[sequence.sequence_id])
            self._lags[sequence.sequence_id] -= count
            self.now += self._a_token * count
            most -= count

    def draft_all(self, wanted: Items[tuple[Sequence, int]]) -> list[list[int]]:
        if self.fails:
            raise RuntimeError("the device is gone")
        self.now += self._a_pass * max(count for _, count in wanted)
        return [[1] * count for _, count in wanted]

    def draft(self, sequence: Sequence, most: int) -> tuple[list[int], int]:
        return self.draft_all([(sequence, most)])[0], 0

    def forget(self, ended: Iterable[SequenceId]) -> None:
        self.forgotten += ended


def run(
    model: VirtualModel, share_right: float, num_sequences: int, a_row: float, *, num_steps: int = 600
) -> tuple[float, float]:
    """Return the seconds of a token with the draft model, and without, of steps of 1 second and `a_row` for a row."""
    chance = random.Random(0)
    speculation = Speculation(model=ModelDrafts(model, clock=lambda: model.now))
    candidates = [
        (make_sequence(number, [1, 2, 3], max_tokens=10**6), 10**6) for number in range(num_sequences)
    ]
    seconds, tokens = 0.0, 0
    for _ in range(num_steps):
        began = model.now
        proposed = (
            speculation.propose(candidates, num_rows=num_sequences, most=256)
            if speculation.may_draft(num_sequences)
            else []
        )
        waited = model.now - began
        tokens += num_sequences
        for sequence, drafted in proposed:
            num_right = 0
            while num_right < len(drafted) and chance.random() < share_right:
                num_right += 1
            speculation.note(sequence, num_drafted=len(drafted), num_right=num_right)
            tokens += num_right
        num_drafts = sum(len(drafted) for _, drafted in proposed)
        took = (1.0 + a_row * (num_sequences + num_drafts)) * chance.uniform(0.97, 1.03)
        speculation.observe(num_sequences, num_drafts, took, waited_seconds=waited)
        seconds += waited + took
    return seconds / tokens, (1.0 + a_row * num_sequences) / num_sequences


@pytest.mark.parametrize("share_right", [0.0, 0.4, 0.9])
@pytest.mark.parametrize("num_sequences", [1, 8, 64])
@pytest.mark.parametrize("a_row", [0.01, 0.3])
@pytest.mark.parametrize("a_pass", [0.02, 0.3, 3.0])
def test_a_draft_model_is_never_much_slower_than_none(
    share_right: float, num_sequences: int, a_row: float, a_pass: float
) -> None:
    with_drafts, without = run(VirtualModel(a_pass), share_right, num_sequences, a_row)
    assert with_drafts < 1.03 * without


def test_a_cheap_model_that_is_mostly_right_makes_a_lone_sequence_faster() -> None:
    with_drafts, without = run(VirtualModel(0.05), 0.8, 1, 0.02)
    assert with_drafts < 0.45 * without


def test_the_cost_of_a_pass_bounds_how_many_tokens_are_guessed() -> None:
    odds = [0.9**number for number in range(1, 16)]

    def chosen(a_pass: float) -> int:
        return most_useful(odds, 1, lambda rows: 1.0 + 0.01 * rows, lambda size: a_pass * size)

    assert chosen(0.0) == 15
    assert 0 < chosen(0.2) < 10
    assert chosen(1.0) == 0


@pytest.mark.parametrize("share_right", [0.0, 0.9])
def test_computing_prompts_first_is_an_investment_that_is_bounded(share_right: float) -> None:
    """The prompts of 8 sequences take the draft model 24 seconds, as long as 22 steps."""
    model = VirtualModel(0.05, a_token=0.001, prompt_tokens=3000)
    with_drafts, without = run(model, share_right, 8, 0.01, num_steps=1000)
    if share_right:
        assert with_drafts < 0.6 * without
    else:
        assert with_drafts < 1.05 * without


def test_a_draft_model_that_fails_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = VirtualModel(0.05)
    drafts = ModelDrafts(model, clock=lambda: model.now)
    sequence = make_sequence(1, [1, 2, 3], max_tokens=100)
    assert drafts.is_ready(sequence)
    assert drafts.draft([(sequence, 3)]) == [[1, 1, 1]]
    model.fails = True
    assert drafts.draft([(sequence, 3)]) == [[]]
    assert drafts.has_failed
    assert not drafts.is_ready(sequence)
    assert caplog.text.count("the draft model has failed") == 1
    drafts.forget([sequence.sequence_id])
    assert model.forgotten == [sequence.sequence_id]
