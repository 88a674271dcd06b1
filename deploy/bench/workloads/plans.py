"""Generators of the workloads of `blockyard bench`. Pure and deterministic by seed.

`arrivals` are the times in seconds at which requests or chats begin. A closed loop uses `at_once()`, because it sends
when one of its sessions has ended. An open loop uses `at_rate()`. mooncake.py reads traces.
"""

from collections.abc import Iterator
from itertools import count, islice, repeat
from math import inf
from random import Random

from blockyard.deploy.bench.workloads.conversations import Conversation, conversations
from blockyard.deploy.bench.workloads.lengths import Lengths
from blockyard.deploy.bench.workloads.requests import PlannedRequest, Run, Tokens, Workload, poisson
from blockyard.deploy.views.quantities import counted


def at_once() -> Iterator[float]:
    return repeat(0.0)


def at_rate(rate: float, seed: int) -> Iterator[float]:
    """Yield random arrival times without end, at a mean rate per second."""
    return poisson(rate, inf, Random(f"arrivals {seed}"))


def random_prompts(
    arrivals: Iterator[float], seed: int, *, num_requests: int, prompt: Lengths, output: Lengths
) -> Workload:
    """Make requests that share no prefix, so that no cache can help."""
    chance, tokens = Random(f"random {seed}"), Tokens()
    requests = [
        PlannedRequest(
            number=number,
            arrival_seconds=arrival,
            prompt=(tokens.run(prompt.draw(chance)),),
            output=tokens.run(output.draw(chance)),
        )
        for number, arrival in enumerate(islice(arrivals, num_requests))
    ]
    about = f"{counted(num_requests, 'request')}, {prompt.text} tokens in, {output.text} out, nothing shared"
    return Workload(name="random", about=about, requests=tuple(requests))


def shared_prefix(
    arrivals: Iterator[float],
    seed: int,
    *,
    num_groups: int,
    num_followers: int,
    prefix: Lengths,
    question: Lengths,
    output: Lengths,
) -> Workload:
    """Make groups of requests: a leader and followers share a prefix, and each has its own question.

    All leaders come first. Then come the followers of all groups, shuffled.
    """
    chance, tokens = Random(f"shared prefix {seed}"), Tokens()
    prefixes = [tokens.run(prefix.draw(chance)) for _ in range(num_groups)]
    followers = [group for group in range(num_groups) for _ in range(num_followers)]
    chance.shuffle(followers)
    requests = [
        PlannedRequest(
            number=number,
            arrival_seconds=arrival,
            prompt=(prefixes[group], tokens.run(question.draw(chance))),
            output=tokens.run(output.draw(chance)),
        )
        for number, group, arrival in zip(count(), [*range(num_groups), *followers], arrivals, strict=False)
    ]
    about = (
        f"{counted(num_groups, 'group')} of 1 + {num_followers} requests, "
        f"{prefix.text} shared + {question.text} own tokens in, {output.text} out"
    )
    return Workload(name="shared-prefix", about=about, requests=tuple(requests))


def chats(arrivals: Iterator[float], seed: int, *, num_sessions: int, kind: Conversation) -> Workload:
    """Make conversations of several turns. A turn waits for the answer before it, and contains that answer."""
    requests = conversations(kind, islice(arrivals, num_sessions), Random(f"chat {seed}"))
    low, high = kind.num_turns
    turns = counted(high, "turn") if low == high else f"{low}-{high} turns"
    systems = counted(kind.num_systems, "system prompt")
    about = f"{counted(num_sessions, 'chat')} of {turns} on {systems} of {kind.system_tokens} tokens"
    return Workload(name="chat", about=about, requests=requests)


def warm_up(workload: Workload, num_requests: int) -> Workload:
    """Make requests of the workload's sizes that share no prefix with it, so that they cache nothing for it."""
    tokens = Tokens()
    tokens.run(1 + max((_end(request) for request in workload.requests), default=0))
    requests = [
        PlannedRequest(
            number=request.number,
            arrival_seconds=0.0,
            prompt=(tokens.run(request.prompt_tokens),),
            output=tokens.run(request.output.length),
        )
        for request in workload.requests[:num_requests]
    ]
    return Workload(name="warm-up", about="", requests=tuple(requests))


def sessions(workload: Workload) -> list[list[PlannedRequest]]:
    """Return sessions, in the order of their first arrivals. A session is a request and its chain of followers."""
    by_number: dict[int, list[PlannedRequest]] = {}
    first: list[list[PlannedRequest]] = []
    for request in workload.requests:
        if request.follows is None:
            by_number[request.number] = [request]
            first.append(by_number[request.number])
        else:
            by_number[request.number] = by_number[request.follows]
            by_number[request.number].append(request)
    return sorted(first, key=lambda session: session[0].arrival_seconds)


def longest(workload: Workload) -> int:
    """Return the tokens of the longest request, output included."""
    return max((request.prompt_tokens + request.output.length for request in workload.requests), default=0)


def _end(request: PlannedRequest) -> int:
    return max(_last(run) for run in (*request.prompt, request.output))


def _last(run: Run) -> int:
    return run.base + run.length
