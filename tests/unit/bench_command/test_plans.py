"""Request plans: equal for equal seeds, of the requested lengths, with the stated share of common prefixes."""

from itertools import pairwise
from random import Random

import pytest
from blockyard.deploy.bench.workloads import plans
from blockyard.deploy.bench.workloads.conversations import Conversation
from blockyard.deploy.bench.workloads.lengths import MAX_TOKENS, parse_lengths
from blockyard.deploy.bench.workloads.requests import PlannedRequest, Workload
from blockyard.deploy.bench.workloads.spelling import Spelling, WordSpelling
from hypothesis import given
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**32)
ranges = st.tuples(st.integers(1, 40), st.integers(0, 40)).map(lambda pair: f"{pair[0]}-{sum(pair)}")
KIND = Conversation(
    num_systems=2,
    system_tokens=30,
    num_turns=(1, 4),
    first_tokens=(3, 9),
    turn_tokens=(1, 5),
    output_tokens=(1, 7),
    pause_seconds=0.5,
)


def spelled(workload: Workload, seed: int = 1) -> list[list[int]]:
    spelling = Spelling(workload.requests, vocab_size=4096, seed=seed)
    return [list(spelling.prompt(request)) for request in workload.requests]


def groups(seed: int, num_groups: int, num_followers: int) -> Workload:
    lengths = {
        name: parse_lengths(text) for name, text in {"prefix": "40", "question": "5-9", "output": "3"}.items()
    }
    return plans.shared_prefix(
        plans.at_once(), seed, num_groups=num_groups, num_followers=num_followers, **lengths
    )


@given(SEEDS, ranges, ranges, st.integers(1, 30))
def test_random_prompts_are_as_many_and_as_long_as_asked_for_and_the_same_each_time(
    seed: int, prompt: str, output: str, num_requests: int
) -> None:
    def made() -> Workload:
        return plans.random_prompts(
            plans.at_once(),
            seed,
            num_requests=num_requests,
            prompt=parse_lengths(prompt),
            output=parse_lengths(output),
        )

    workload = made()
    assert workload == made()
    assert len(workload.requests) == num_requests
    for request, ids in zip(workload.requests, spelled(workload), strict=True):
        for text, length in ((prompt, len(ids)), (output, request.output.length)):
            low, high = map(int, text.split("-"))
            assert low <= length <= high


@given(SEEDS, st.integers(1, 5), st.integers(0, 6))
def test_a_group_shares_its_prefix_with_its_followers_and_with_nobody_else(
    seed: int, num_groups: int, num_followers: int
) -> None:
    prompts = spelled(groups(seed, num_groups, num_followers))
    by_prefix: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        by_prefix[tuple(prompt[:40])] = by_prefix.get(tuple(prompt[:40]), 0) + 1
    assert sorted(by_prefix.values()) == [1 + num_followers] * num_groups
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts), "each has a question of its own"
    assert len({tuple(prompt[:40]) for prompt in prompts[:num_groups]}) == num_groups, "leaders come first"


@given(SEEDS, st.integers(1, 8))
def test_each_turn_of_a_chat_begins_with_the_turn_before_it_and_its_answer(
    seed: int, num_sessions: int
) -> None:
    workload = plans.chats(plans.at_once(), seed, num_sessions=num_sessions, kind=KIND)
    sessions = plans.sessions(workload)
    assert len(sessions) == num_sessions
    assert sorted(request.number for session in sessions for request in session) == list(
        range(len(workload.requests))
    )
    spelling = Spelling(workload.requests, vocab_size=4096, seed=seed)
    for session in sessions:
        for earlier, later in pairwise(session):
            before, answer = list(spelling.prompt(earlier)), [7] * (earlier.output.length + 1)
            spelling.answered(earlier.output, answer)
            assert list(spelling.prompt(later))[: len(before) + len(answer)] == before + answer


@given(SEEDS, st.integers(1, 8))
def test_each_turn_of_a_chat_in_words_begins_with_the_messages_before_it_and_its_answer(
    seed: int, num_sessions: int
) -> None:
    workload = plans.chats(plans.at_once(), seed, num_sessions=num_sessions, kind=KIND)
    spelling = WordSpelling(workload.requests, seed=seed)
    for session in plans.sessions(workload):
        for earlier, later in pairwise(session):
            before = spelling.messages(earlier)
            spelling.answered(earlier.output, f"answer {earlier.number}")
            after = spelling.messages(later)
            assert after[: len(before)] == before
            assert [said.role for said in after] == ["user", "assistant"] * (len(after) // 2) + ["user"]
            assert after[len(before)].text == f"answer {earlier.number}"


@given(SEEDS)
def test_words_of_one_prefix_are_equal_and_those_of_another_salt_are_not(seed: int) -> None:
    workload = groups(seed, 2, 3)
    spelled = {
        salt: [
            WordSpelling(workload.requests, seed=f"{seed} {salt}").prompt(request)
            for request in workload.requests
        ]
        for salt in ("a", "b")
    }
    assert spelled["a"] != spelled["b"]
    by_prefix: dict[int, set[str]] = {}
    for request, text in zip(workload.requests, spelled["a"], strict=True):
        words = text.split()
        prefix = request.prompt[0]
        by_prefix.setdefault(prefix.base, set()).add(" ".join(words[: prefix.length]))
        assert len(words) == request.prompt_tokens
    assert all(len(prefixes) == 1 for prefixes in by_prefix.values())


@given(SEEDS, st.integers(0, 9))
def test_warming_up_shares_nothing_with_what_is_measured(seed: int, num_requests: int) -> None:
    workload = groups(seed, 3, 2)
    warm = plans.warm_up(workload, num_requests)
    assert [request.prompt_tokens for request in warm.requests] == [
        request.prompt_tokens for request in workload.requests[:num_requests]
    ]
    measured = {tuple(ids[:8]) for ids in spelled(workload)}
    assert measured.isdisjoint(tuple(ids[:8]) for ids in spelled(warm))


def test_another_seed_is_another_vocabulary_of_the_same_plan() -> None:
    workload = groups(1, 2, 1)
    assert spelled(workload, seed=1) == spelled(workload, seed=1) != spelled(workload, seed=2)


def test_arrivals_of_an_open_loop_come_at_the_rate_on_average() -> None:
    arrivals = plans.at_rate(50.0, 3)
    times = [next(arrivals) for _ in range(5_000)]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(100, rel=0.05)


def test_the_longest_request_counts_its_output() -> None:
    workload = groups(0, 1, 0)
    assert plans.longest(workload) == workload.requests[0].prompt_tokens + 3
    assert plans.longest(Workload(name="empty", about="", requests=())) == 0


def test_lengths_are_drawn_round_their_middle() -> None:
    for text in ("300", "200-400", "normal:300:50", "lognormal:300:0.5"):
        lengths, chance = parse_lengths(text), Random(1)
        drawn = sorted(lengths.draw(chance) for _ in range(2001))
        assert drawn[1000] == pytest.approx(300, rel=0.06)


@given(st.sampled_from(["normal:1:1000", "lognormal:5:5", "normal:16777216:1e9"]), SEEDS)
def test_no_length_is_below_one_token_or_beyond_all_bounds(text: str, seed: int) -> None:
    assert 1 <= parse_lengths(text).draw(Random(seed)) <= MAX_TOKENS


def test_what_is_no_distribution_is_refused_and_named() -> None:
    for text in ("", "0", "-5", "9-3", "a", "1-b", "normal", "normal:5", "normal:x:1", "zipf:5:1", "1:2:3:4"):
        with pytest.raises(ValueError, match="lengths"):
            parse_lengths(text)
    with pytest.raises(ValueError, match="must not be negative"):
        parse_lengths("normal:5:-1")


def test_a_request_that_follows_none_is_a_session_of_its_own() -> None:
    workload = groups(0, 2, 1)
    sessions: list[list[PlannedRequest]] = plans.sessions(workload)
    assert [len(session) for session in sessions] == [1, 1, 1, 1]
