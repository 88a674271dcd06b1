"""One run after another on one cluster: warm-up first, then each policy in turn, each with a fresh cache.

Owns the order, and what keeps one run out of another's caches. Does not own sending (traffic.py) nor the numbers
(summaries.py).
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from blockyard.deploy.bench.plans import longest, warm_up
from blockyard.deploy.bench.requests import Workload
from blockyard.deploy.bench.spelling import Spelling
from blockyard.deploy.bench.summaries import Traffic
from blockyard.deploy.bench.traffic import Manner, send
from blockyard.router.client import AsyncClient, BlockyardError

Plan = Callable[[int], Workload]
"""The workload of a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What a benchmark does."""

    plan: Plan
    seed: int
    manner: Manner
    policies: tuple[str, ...] = ()
    """To compare; none: the router's own alone."""
    rounds: int = 1
    """How often each policy has its turn, each time with another seed."""
    warm_up_requests: int = 4
    flush: bool = False
    """Empty every cache before each run; always so where policies are compared."""
    cache_salt: str | None = None
    """None: another one for each run, so that none finds what another has left."""


Trials = dict[str, list[Traffic]]
"""By policy, round by round; of the router's own under ""."""


async def run_course(clients: Sequence[AsyncClient], course: Course) -> Trials:
    """Raises ValueError where the workload does not fit the model, BlockyardError where the cluster does not answer."""
    model = (await clients[0].list_models())[0]
    found: Trials = {policy: [] for policy in course.policies or ("",)}
    for number in range(course.rounds):
        seed = course.seed + number
        workload = course.plan(seed)
        _check_fits(workload, model.max_model_len)
        # Whoever is second finds another machine than the first: they take turns at that.
        for policy in list(found)[:: -1 if number % 2 else 1]:
            manner = replace(
                course.manner,
                policy=policy or course.manner.policy,
                cache_salt=f"bench-{secrets.token_hex(8)}"
                if course.cache_salt is None
                else course.cache_salt,
            )
            if number == 0:
                await _warm_up(clients, workload, manner, course, model.vocab_size)
            if course.flush or course.policies:
                await clients[0].flush_cache()
            spelling = Spelling(workload.requests, vocab_size=model.vocab_size, seed=seed)
            found[policy].append(await _counted(clients, workload, spelling, manner, model.block_size))
    return found


async def _warm_up(
    clients: Sequence[AsyncClient], workload: Workload, manner: Manner, course: Course, vocab_size: int
) -> None:
    """First steps of an engine, first look-ups, connections: paid before anything is measured."""
    warm = warm_up(workload, course.warm_up_requests)
    spelling = Spelling(warm.requests, vocab_size=vocab_size, seed=course.seed)
    quietly = replace(manner, concurrency=max(len(warm.requests), 1), on_end=lambda sample: None)
    await send(clients, warm, spelling, quietly)


async def _counted(
    clients: Sequence[AsyncClient], workload: Workload, spelling: Spelling, manner: Manner, block_size: int
) -> Traffic:
    """With what the index promised meanwhile. Each router process counts for itself: with several connections nobody
    knows how many there are."""
    before = await _promised_blocks(clients)
    traffic = await send(clients, workload, spelling, manner)
    after = await _promised_blocks(clients)
    if before is None or after is None or after < before:
        return traffic
    return replace(traffic, promised_tokens=(after - before) * block_size)


async def _promised_blocks(clients: Sequence[AsyncClient]) -> int | None:
    if len(clients) > 1:
        return None
    try:
        return (await clients[0].index_info()).promised_blocks
    except BlockyardError:
        return None  # For viewers and admins alone, and there may be no index.


def _check_fits(workload: Workload, max_model_len: int) -> None:
    if not workload.requests:
        raise ValueError(f"the workload {workload.name} has no requests")
    if (most := longest(workload)) > max_model_len:
        raise ValueError(
            f"the workload {workload.name} has a request of {most} tokens with its output, and the model holds "
            f"{max_model_len}"
        )
