"""The sampler's state is right after forks, replays and steps in flight, and independent of other rows."""

from typing import Any

import pytest
import torch
from blockyard.worker.sampling.sampler import Sampler
from blockyard.worker.sequences.identifiers import SequenceId
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.sequences.sequence import Sequence, token_array
from blockyard.worker.sequences.step_plan import ScheduledRow
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples

from .sampling import VOCAB_SIZE, Draw, make_row, random_logits, sample_rows

PENALISING = SamplingParams(
    temperature=0.5,
    presence_penalty=1.0,
    frequency_penalty=1.0,
    repetition_penalty=1.5,
    seed=3,
    max_tokens=64,
)
PROMPT = [1, 2, 3, 3]
NUM_STEPS = 24


def make_sequence(
    sampling: SamplingParams, *, sequence_id: int = 0, tokens: list[int] | None = None
) -> Sequence:
    return Sequence(
        sequence_id=SequenceId(sequence_id),
        tokens=token_array(PROMPT if tokens is None else tokens),
        prompt_length=len(PROMPT),
        sampling=sampling,
        names=[],
    )


def row_at(sequence: Sequence, position: int) -> ScheduledRow:
    return ScheduledRow(sequence=sequence, start=position - 1, num_tokens=1, samples=True)


def flat_logits(position: int) -> torch.Tensor:
    """Alike at all positions, so that the last token would come again if it were not penalised."""
    return random_logits(1, 12) + 0.1 * random_logits(1, 12, seed=position)


def from_the_start(tokens: list[int], sampling: SamplingParams = PENALISING) -> int:
    """Return the draw of a sampler that has never seen the sequence before."""
    sequence = make_sequence(sampling, tokens=tokens)
    return sample_rows(flat_logits(len(tokens)), [row_at(sequence, len(tokens))]).tokens[0]


def expected_run(sampling: SamplingParams = PENALISING) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(NUM_STEPS):
        tokens.append(from_the_start(tokens, sampling))
    return tokens


@pytest.mark.parametrize("lag", [0, 1])
def test_penalties_count_tokens_in_flight_as_if_they_were_committed(lag: int) -> None:
    sampler, sequence = Sampler(12, torch.device("cpu")), make_sequence(PENALISING)
    pending: list[int] = []
    in_flight: dict[tuple[SequenceId, int], int] = {}
    for position in range(len(PROMPT), len(PROMPT) + NUM_STEPS):
        drawn = sampler.sample(flat_logits(position), [row_at(sequence, position)], in_flight=in_flight)
        in_flight = {(sequence.sequence_id, position): drawn.tokens[0]}
        pending += drawn.tokens
        while len(pending) > lag:
            sequence.tokens.append(pending.pop(0))
    expected = expected_run()
    assert [*sequence.tokens, *pending] == expected
    assert expected != expected_run(SamplingParams(temperature=0.5, seed=3, max_tokens=64))


def test_a_sequence_first_seen_with_a_token_in_flight_counts_it() -> None:
    expected = expected_run()
    for position in range(len(PROMPT) + 1, len(expected)):
        sequence = make_sequence(PENALISING, tokens=expected[: position - 1])
        sampler = Sampler(12, torch.device("cpu"))
        in_flight = {(sequence.sequence_id, position - 1): expected[position - 1]}
        drawn = sampler.sample(flat_logits(position), [row_at(sequence, position)], in_flight=in_flight)
        assert drawn.tokens == [expected[position]]


def test_a_step_that_was_thrown_away_is_not_counted() -> None:
    """A preemption may discard a token in flight; the sequence then samples that position again."""
    sampler, sequence = Sampler(12, torch.device("cpu")), make_sequence(PENALISING)
    for position in range(len(PROMPT), len(PROMPT) + NUM_STEPS):
        tokens = {
            sampler.sample(flat_logits(position), [row_at(sequence, position)], in_flight={}).tokens[0]
            for _ in range(3)
        }
        assert len(tokens) == 1
        sequence.tokens.extend(tokens)
    assert list(sequence.tokens) == expected_run()


def test_penalties_of_forks_equal_those_from_the_start() -> None:
    sampler, forking = Sampler(12, torch.device("cpu")), make_sequence(PENALISING)
    forking.num_outputs = 3
    position = len(PROMPT)
    drawn = sampler.sample(flat_logits(position), [row_at(forking, position)], in_flight={})
    firsts = [drawn.tokens[0], *drawn.extras[0].tokens]
    forking.num_outputs = 1
    forking.tokens.append(firsts[0])
    others = [
        make_sequence(PENALISING, sequence_id=index, tokens=[*PROMPT, firsts[index]]) for index in (1, 2)
    ]
    outputs = [forking, *others]
    for index, output in enumerate(outputs):
        output.index = index
    for position in range(len(PROMPT) + 1, len(PROMPT) + 12):
        logits_SV = flat_logits(position).expand(3, -1)
        together = sampler.sample(logits_SV, [row_at(output, position) for output in outputs], in_flight={})
        fresh = sample_rows(logits_SV, [row_at(output, position) for output in outputs])
        assert together.tokens == fresh.tokens
        for output, token in zip(outputs, together.tokens, strict=True):
            output.tokens.append(token)
    assert len({tuple(output.tokens) for output in outputs}) == 3


def test_slots_and_counts_are_freed_and_carry_nothing_over() -> None:
    sampler = Sampler(VOCAB_SIZE, torch.device("cpu"))
    logits_1V = random_logits(1)
    kinds = [
        {"frequency_penalty": 2.0, "repetition_penalty": 3.0},
        {"allowed_token_ids": frozenset({1, 2})},
        {"logit_bias": ((9, 50.0),)},
        {"bad_token_ids": frozenset(range(30))},
        {"temperature": 0.0},
        {},
    ]
    for number in range(300):
        tokens = [(number * 7 + place * place) % VOCAB_SIZE for place in range(6)]
        draw = Draw(SamplingParams(seed=number, **kinds[number % len(kinds)]), len(tokens), 3)
        row = make_row(draw, number, list(tokens))
        fresh = sample_rows(logits_1V, [row])
        assert sampler.sample(logits_1V, [row], in_flight={}) == fresh
        sampler.forget([SequenceId(number), SequenceId(10**9)])
        assert len(sampler.state) == sampler.state.counts.num_used == len(sampler.state.lists) == 0
    assert len(sampler.state._columns) <= 64
    assert len(sampler.state.counts._outputs_CV) <= 4


def test_an_id_that_means_another_sequence_is_another_sequence() -> None:
    sampler, logits_1V = Sampler(VOCAB_SIZE, torch.device("cpu")), random_logits(1)
    for token in (3, 8):
        row = make_row(Draw(SamplingParams(allowed_token_ids=frozenset({token})), 4, 0), 0)
        assert sampler.sample(logits_1V, [row], in_flight={}).tokens == [token]
    assert len(sampler.state) == 1


def test_many_sequences_grow_the_state_without_changing_it() -> None:
    sampler, position = Sampler(12, torch.device("cpu")), len(PROMPT)
    sequences = [make_sequence(PENALISING, sequence_id=number) for number in range(70)]
    for step in range(3):
        rows = [row_at(sequence, position + step) for sequence in sequences]
        drawn = sampler.sample(flat_logits(position + step).expand(70, -1), rows, in_flight={})
        for sequence, token in zip(sequences, drawn.tokens, strict=True):
            sequence.tokens.append(token)
        sequences.append(make_sequence(PENALISING, sequence_id=100 + step, tokens=list(sequences[0].tokens)))
        sequences.pop(1)
    assert {tuple(sequence.tokens) for sequence in sequences} == {tuple(expected_run()[: position + 3])}


token_ids = st.integers(min_value=0, max_value=2 * VOCAB_SIZE)
options = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.5, 1.0, 30.0]), "seed": st.integers(-(2**63), 2**63 - 1)},
    optional={
        "top_k": st.integers(0, 50),
        "top_p": st.floats(0.01, 1.0),
        "min_p": st.floats(0.0, 1.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "repetition_penalty": st.floats(0.01, 100.0),
        "logit_bias": st.lists(st.tuples(token_ids, st.floats(-100, 100)), max_size=5).map(tuple),
        "allowed_token_ids": st.frozensets(token_ids, max_size=6),
        "bad_token_ids": st.frozensets(token_ids, max_size=60),
        "min_tokens": st.integers(0, 16),
        "eos_token_ids": st.frozensets(token_ids, max_size=4),
        "stop_token_ids": st.frozensets(token_ids, max_size=4),
        "n": st.integers(1, 4),
        "logprobs": st.integers(0, 20),
    },
)
beams = st.fixed_dictionaries(
    {"beam_width": st.integers(1, 60), "eos_token_ids": st.frozensets(token_ids, max_size=3)},
    optional={"min_tokens": st.integers(0, 16)},
)


@st.composite
def rows_of_a_step(draw: Any) -> list[ScheduledRow]:
    rows = []
    for number, kwargs in enumerate(draw(st.lists(st.one_of(options, beams), min_size=2, max_size=7))):
        tokens = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20))
        num_generated = draw(st.integers(0, len(tokens) - 1))
        rows.append(make_row(Draw(SamplingParams(**kwargs), len(tokens), num_generated), number, tokens))
    return rows


@examples(150, deadline=None)
@given(
    rows=rows_of_a_step(), seed=st.integers(0, 1000), order_seed=st.integers(0, 1000), poison=st.booleans()
)
def test_a_row_gets_the_same_alone_and_in_any_company(
    rows: list[ScheduledRow], seed: int, order_seed: int, poison: bool
) -> None:
    # Rounded, so that many tokens are equally likely: order among equals must not depend on company either.
    logits_SV = random_logits(len(rows), seed=seed).round()
    if poison:
        logits_SV[0, 5] = float("nan")
    together = sample_rows(logits_SV, rows)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(order_seed)).tolist()
    shuffled = sample_rows(logits_SV[order], [rows[row] for row in order])
    for place, row in enumerate(order):
        alone = sample_rows(logits_SV[row : row + 1], [rows[row]])
        assert alone.tokens == [together.tokens[row]] == [shuffled.tokens[place]]
        assert alone.extras.get(0) == together.extras.get(row) == shuffled.extras.get(place)
