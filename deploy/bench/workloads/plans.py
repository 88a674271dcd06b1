"""The workloads of `blockyard bench`, by the number of requests. Pure, and the same for the same seed.

`arrivals` are the seconds at which requests, or sessions of a chat, begin: `at_once()` for a closed loop, which sends
when it has a place, and `at_rate()` for an open one. Traces are read by mooncake.py.
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
    """Nothing is shared: no cache can help."""
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
    """Each group has a prefix of its own, which its leader brings and its followers share, each with another question.
    The leaders come first; then the groups are mixed."""
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
    """Conversations of several turns; a turn waits for the answer before it, and has it in its prompt."""
    requests = conversations(kind, islice(arrivals, num_sessions), Random(f"chat {seed}"))
    low, high = kind.num_turns
    turns = counted(high, "turn") if low == high else f"{low}-{high} turns"
    systems = counted(kind.num_systems, "system prompt")
    about = f"{counted(num_sessions, 'chat')} of {turns} on {systems} of {kind.system_tokens} tokens"
    return Workload(name="chat", about=about, requests=requests)


def warm_up(workload: Workload, num_requests: int) -> Workload:
    """So many requests of the workload's own sizes, with nothing in common with it: none of its prefixes is cached by
    them."""
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
    """Each a request and those that follow it, one after the other; by the arrival of the first."""
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
    """Tokens of the longest request, its output included."""
    return max((request.prompt_tokens + request.output.length for request in workload.requests), default=0)


def _end(request: PlannedRequest) -> int:
    return max(_last(run) for run in (*request.prompt, request.output))


def _last(run: Run) -> int:
    return run.base + run.length
