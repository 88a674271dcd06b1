"""Workloads of the simulation by name, and their sizes. blockyard.deploy.bench.workloads owns the types."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from random import Random

from blockyard.deploy.bench.workloads.conversations import Conversation, conversations
from blockyard.deploy.bench.workloads.requests import PlannedRequest, Run, Tokens, Workload, poisson


def shared_prefix(
    rate: float,
    seconds: float,
    seed: int,
    *,
    groups: int = 150,
    users: int = 5,
    system_tokens: int = 6000,
    question_tokens: int = 1200,
    output_tokens: int = 1000,
) -> Workload:
    """Make requests of random users in random groups: the group's system prompt, then the user's only question."""
    chance, tokens = Random(f"shared prefix {seed}"), Tokens()
    systems = [tokens.run(system_tokens) for _ in range(groups)]
    questions = [[tokens.run(question_tokens) for _ in range(users)] for _ in range(groups)]
    requests = []
    for number, arrival in enumerate(poisson(rate, seconds, chance)):
        group, user = chance.randrange(groups), chance.randrange(users)
        requests.append(
            PlannedRequest(
                number=number,
                arrival_seconds=arrival,
                prompt=(systems[group], questions[group][user]),
                output=tokens.run(output_tokens),
                session=f"{group}.{user}",
            )
        )
    about = f"{groups} groups x {users} users, {system_tokens} + {question_tokens} in, {output_tokens} out, {rate:g}/s"
    return Workload(name="shared-prefix", about=about, requests=tuple(requests))


CHATS = Conversation(
    num_systems=20,
    system_tokens=1000,
    num_turns=(2, 10),
    first_tokens=(50, 800),
    turn_tokens=(20, 400),
    output_tokens=(100, 500),
    pause_seconds=8.0,
)
AGENTS = Conversation(
    num_systems=4,
    system_tokens=5000,
    num_turns=(10, 30),
    first_tokens=(200, 2000),
    turn_tokens=(200, 3000),
    output_tokens=(30, 200),
    pause_seconds=1.0,
)


def _conversations(kind: Conversation, rate: float, seconds: float, seed: int) -> tuple[PlannedRequest, ...]:
    """Make conversations. `rate` is the number of new conversations per second."""
    chance = Random(f"conversations {seed}")
    return conversations(kind, poisson(rate, seconds, chance), chance)


def multi_turn(rate: float, seconds: float, seed: int) -> Workload:
    requests = _conversations(CHATS, rate, seconds, seed)
    return Workload(
        name="multi-turn", about=f"chats of 2-10 turns, {rate:g} new ones a second", requests=requests
    )


def agents(rate: float, seconds: float, seed: int) -> Workload:
    requests = _conversations(AGENTS, rate, seconds, seed)
    return Workload(
        name="agents", about=f"agents of 10-30 calls, {rate:g} new ones a second", requests=requests
    )


def independent(
    name: str,
    about: str,
    rate: float,
    seconds: float,
    seed: int,
    *,
    systems: tuple[Run, ...] = (),
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
) -> Workload:
    """Make requests with Poisson arrivals, each on one of `systems`, or without a shared prefix if there are none."""
    chance, tokens = Random(f"{name} {seed}"), Tokens()
    first = [tokens.run(system.length) for system in systems]
    requests = []
    for number, arrival in enumerate(poisson(rate, seconds, chance)):
        shared = (chance.choice(first),) if first else ()
        requests.append(
            PlannedRequest(
                number=number,
                arrival_seconds=arrival,
                prompt=(*shared, tokens.run(chance.randint(*prompt_tokens))),
                output=tokens.run(chance.randint(*output_tokens)),
            )
        )
    return Workload(name=name, about=f"{about}, {rate:g}/s", requests=tuple(requests))


def nothing_shared(rate: float, seconds: float, seed: int) -> Workload:
    return independent(
        "nothing-shared", "2,000-8,000 in, 50-500 out, no prefix in common", rate, seconds, seed,
        prompt_tokens=(2000, 8000), output_tokens=(50, 500),
    )  # fmt: skip


def one_group(rate: float, seconds: float, seed: int) -> Workload:
    return independent(
        "one-group", "one system prompt of 6,000, 200 in, 100-500 out", rate, seconds, seed,
        systems=(Run(0, 6000),), prompt_tokens=(200, 200), output_tokens=(100, 500),
    )  # fmt: skip


def long_prompts(rate: float, seconds: float, seed: int) -> Workload:
    return independent(
        "long-prompts", "32,000 in, 1 out, no prefix in common", rate, seconds, seed,
        prompt_tokens=(32_000, 32_000), output_tokens=(1, 1),
    )  # fmt: skip


def uniform_groups(rate: float, seconds: float, seed: int) -> Workload:
    return independent(
        "uniform-groups", "20 groups, system prompts of 2,000, 200 in, 100-300 out", rate, seconds, seed,
        systems=(Run(0, 2000),) * 20, prompt_tokens=(200, 200), output_tokens=(100, 300),
    )  # fmt: skip


def burst(rate: float, seconds: float, seed: int) -> Workload:
    return independent(
        "burst", "50 groups, system prompts of 6,000, 60 in, 20-100 out", rate, seconds, seed,
        systems=(Run(0, 6000),) * 50, prompt_tokens=(60, 60), output_tokens=(20, 100),
    )  # fmt: skip


def bursts(rate: float, seconds: float, seed: int) -> Workload:
    """Make four times the rate in each first second of four, and nothing between. 40 groups, some popular."""
    chance = Random(f"bursts {seed}")
    arrivals = [4 * int(at) + at % 1 for at in poisson(4 * rate, seconds / 4, chance)]
    requests = _popular(arrivals, chance, groups=40, system_tokens=4000, question_tokens=(100, 600))
    return Workload(
        name="bursts", about=f"40 groups of 4,000, a burst each 4 s, {rate:g}/s on average", requests=requests
    )


def shifting(rate: float, seconds: float, seed: int) -> Workload:
    """Make requests whose popular groups change every 5 seconds."""
    chance = Random(f"shifting {seed}")
    requests = _popular(
        list(poisson(rate, seconds, chance)),
        chance,
        groups=200,
        system_tokens=6000,
        question_tokens=(100, 1000),
        shift_seconds=5.0,
    )
    return Workload(
        name="shifting",
        about=f"200 groups of 6,000, other popular ones each 5 s, {rate:g}/s",
        requests=requests,
    )


def _popular(
    arrivals: list[float],
    chance: Random,
    *,
    groups: int,
    system_tokens: int,
    question_tokens: tuple[int, int],
    shift_seconds: float = inf,
) -> tuple[PlannedRequest, ...]:
    """Make requests on the groups, each half as popular as one of half its rank. Ranks are dealt anew at each shift."""
    tokens = Tokens()
    systems = [tokens.run(system_tokens) for _ in range(groups)]
    weights, requests, dealt = [1 / (1 + rank) for rank in range(groups)], [], 0
    for number, arrival in enumerate(arrivals):
        if int(arrival / shift_seconds) > dealt:
            dealt = int(arrival / shift_seconds)
            chance.shuffle(systems)
        (system,) = chance.choices(systems, weights)
        prompt = (system, tokens.run(chance.randint(*question_tokens)))
        output = tokens.run(chance.randint(20, 200))
        requests.append(PlannedRequest(number=number, arrival_seconds=arrival, prompt=prompt, output=output))
    return tuple(requests)


PAUSING_AGENTS = Conversation(
    num_systems=4,
    system_tokens=8000,
    num_turns=(3, 12),
    first_tokens=(500, 8000),
    turn_tokens=(100, 6000),
    output_tokens=(20, 150),
    pause_seconds=6.0,
)


def pausing_agents(rate: float, seconds: float, seed: int) -> Workload:
    requests = _conversations(PAUSING_AGENTS, rate, seconds, seed)
    return Workload(
        name="pausing-agents",
        about=f"agents of 3-12 calls, 6 s between them, {rate:g} new ones a second",
        requests=requests,
    )


def short_beside_long(rate: float, seconds: float, seed: int) -> Workload:
    """Make short requests of 20 groups, and for 120 of them one prompt of 60,000 tokens."""
    chance = Random(f"short beside long {seed}")
    tokens = Tokens()
    systems = [tokens.run(500) for _ in range(20)]
    requests = []
    for number, arrival in enumerate(poisson(rate, seconds, chance)):
        if chance.random() < 1 / 121:
            prompt: tuple[Run, ...] = (tokens.run(60_000),)
        else:
            prompt = (chance.choice(systems), tokens.run(chance.randint(50, 500)))
        output = tokens.run(chance.randint(20, 150))
        requests.append(PlannedRequest(number=number, arrival_seconds=arrival, prompt=prompt, output=output))
    return Workload(
        name="short-beside-long",
        about=f"600-1,000 in, and 60,000 once in 121, {rate:g}/s",
        requests=tuple(requests),
    )


def uniform_pool(rate: float, seconds: float, seed: int) -> Workload:
    return independent(
        "uniform-pool", "40 prefixes of 24,000, 256 in, 64 out", rate, seconds, seed,
        systems=(Run(0, 24_000),) * 40, prompt_tokens=(256, 256), output_tokens=(64, 64),
    )  # fmt: skip


def hot_set(rate: float, seconds: float, seed: int) -> Workload:
    return independent(
        "hot-set", "4 prefixes of 24,000, 256 in, 512 out", rate, seconds, seed,
        systems=(Run(0, 24_000),) * 4, prompt_tokens=(256, 256), output_tokens=(512, 512),
    )  # fmt: skip


DOCUMENTS = Conversation(
    num_systems=1,
    system_tokens=16,
    num_turns=(6, 6),
    first_tokens=(24_000, 24_000),
    turn_tokens=(20, 60),
    output_tokens=(256, 256),
    pause_seconds=0.5,
)


def document_questions(rate: float, seconds: float, seed: int) -> Workload:
    requests = _conversations(DOCUMENTS, rate, seconds, seed)
    about = f"documents of 24,000, 6 questions about each, 256 out, {rate:g} documents a second"
    return Workload(name="document-questions", about=about, requests=requests)


TOOL_AGENTS = replace(AGENTS, num_turns=(5, 12), output_tokens=(10, 50))
TOOL_SECONDS = (5.0, 120.0)


def tool_agents(rate: float, seconds: float, seed: int) -> Workload:
    """Make agents that wait for a tool between two calls, each time for another time."""
    chance = Random(f"tools {seed}")
    requests = tuple(
        request
        if request.follows is None
        else replace(request, arrival_seconds=chance.uniform(*TOOL_SECONDS))
        for request in _conversations(TOOL_AGENTS, rate, seconds, seed)
    )
    about = f"agents of 5-12 calls, tools of 5-120 s between them, {rate:g} new ones a second"
    return Workload(name="tool-agents", about=about, requests=requests)


NUM_ADAPTERS = 100


def adapters(
    rate: float, seconds: float, seed: int, *, prompt_tokens: int = 256, output_tokens: int = 1
) -> Workload:
    """Make requests for LoRA adapters of Zipf popularity with exponent 1. They share no prefix."""
    chance, tokens = Random(f"adapters {seed}"), Tokens()
    weights = [1 / rank for rank in range(1, NUM_ADAPTERS + 1)]
    requests = tuple(
        PlannedRequest(
            number=number,
            arrival_seconds=arrival,
            prompt=(tokens.run(prompt_tokens),),
            output=tokens.run(output_tokens),
            adapter=chance.choices(range(NUM_ADAPTERS), weights)[0],
        )
        for number, arrival in enumerate(poisson(rate, seconds, chance))
    )
    about = f"{NUM_ADAPTERS} adapters, {prompt_tokens} in, {output_tokens} out, {rate:.3g}/s"
    return Workload(name="adapters", about=about, requests=requests)


GENERATORS: dict[str, Callable[[float, float, int], Workload]] = {
    "shared-prefix": shared_prefix,
    "multi-turn": multi_turn,
    "agents": agents,
    "nothing-shared": nothing_shared,
    "one-group": one_group,
    "long-prompts": long_prompts,
    "uniform-groups": uniform_groups,
    "burst": burst,
    "bursts": bursts,
    "shifting": shifting,
    "pausing-agents": pausing_agents,
    "short-beside-long": short_beside_long,
    "uniform-pool": uniform_pool,
    "hot-set": hot_set,
    "document-questions": document_questions,
    "tool-agents": tool_agents,
    "adapters": adapters,
}
"""Generators by name. Arguments: rate per second, seconds, seed."""
