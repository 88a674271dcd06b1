"""The study of agents' hints: what clients say, and that saying the truth pays where memory is short."""

from dataclasses import replace
from statistics import fmean

from bench.placement.hints import BASES, CASES, HINTS, hinted, reuse, with_liars
from bench.placement.simulation.workloads import tool_agents


def test_an_exact_hint_is_the_pause_until_the_next_request_and_the_last_has_none() -> None:
    workload = hinted(tool_agents(0.2, 30.0, 1), HINTS["exact"], 1)
    followers = {each.follows: each for each in workload.requests}
    for each in workload.requests:
        follower = followers.get(each.number)
        assert each.expected_pause_seconds == (0.0 if follower is None else follower.arrival_seconds)


def test_liars_share_no_token_and_no_number_with_agents() -> None:
    agents = tool_agents(0.2, 30.0, 1)
    full = with_liars(agents, 30.0, 1)
    lies = full.requests[len(agents.requests) :]
    assert full.requests[: len(agents.requests)] == agents.requests
    assert len({each.number for each in full.requests}) == len(full.requests)
    last = max(run.base + run.length for each in agents.requests for run in (*each.prompt, each.output))
    assert lies
    assert min(run.base for each in lies for run in each.prompt) >= last
    assert all(each.expected_pause_seconds for each in lies)


def test_the_truth_pays_where_memory_is_short_and_changes_nothing_where_it_is_not() -> None:
    none, exact = CASES[:2]
    assert BASES[exact] == none == replace(exact, hint="none")
    short = [[reuse(case, 2000, 120.0, seed) for seed in range(2)] for case in (none, exact)]
    assert fmean(short[1]) > fmean(short[0]) + 0.02
    assert reuse(exact, 50_000, 60.0, 0) == reuse(none, 50_000, 60.0, 0)
