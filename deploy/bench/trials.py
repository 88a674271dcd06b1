"""Series of runs on one target: each policy in turn, round by round, with a warm-up before its first run.

Owns the order. Keeps one run out of another's cached prefixes, unless both were given one salt. Does not own sending
(traffic.py) or the numbers (summaries.py).
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from blockyard.deploy.bench.summaries import Traffic
from blockyard.deploy.bench.targets import Asking, Target
from blockyard.deploy.bench.traffic import Manner, send_all
from blockyard.deploy.bench.workloads.plans import longest, warm_up
from blockyard.deploy.bench.workloads.requests import Workload

Plan = Callable[[int], Workload]
"""Makes the workload of a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Settings of a series of runs."""

    plan: Plan
    seed: int
    manner: Manner
    temperature: float = 0.0
    policies: tuple[str, ...] = ()
    """Policies to compare. If empty, only the router's own policy runs."""
    rounds: int = 1
    """Runs of each policy, each with another seed."""
    warm_up_requests: int = 4
    flush: bool = False
    """Empty every cache before each run. Always done when policies are compared."""
    cache_salt: str | None = None
    """None draws a new salt for each run, so that no run finds prefixes of another."""


Trials = dict[str, list[Traffic]]
"""Traffic of each round, by policy. The router's own policy has the name ""."""


async def run_course(target: Target, course: Course) -> Trials:
    """Run the benchmark, and return the traffic of each policy and round.

    Raise ValueError if the workload does not fit the model. Errors of a target that does not answer are raised too.
    """
    max_model_len = await target.max_model_len()
    found: Trials = {policy: [] for policy in course.policies or ("",)}
    for number in range(course.rounds):
        seed = course.seed + number
        workload = course.plan(seed)
        _check_fits(workload, max_model_len)
        # The machine changes from run to run, for example its temperature. Reverse the order in every other round.
        for policy in list(found)[:: -1 if number % 2 else 1]:
            asking = Asking(
                seed=seed,
                cache_salt=f"bench-{secrets.token_hex(8)}"
                if course.cache_salt is None
                else course.cache_salt,
                temperature=course.temperature,
                policy=policy or None,
            )
            if number == 0:
                await _warm_up(target, workload, asking, course)
            if course.flush or course.policies:
                await target.flush()
            found[policy].append(await _counted(target, workload, asking, course.manner))
    return found


async def _warm_up(target: Target, workload: Workload, asking: Asking, course: Course) -> None:
    """Send the warm-up, so that an engine's first steps, first look-ups and connections are not measured."""
    warm = warm_up(workload, course.warm_up_requests)
    ask = await target.asking(warm, replace(asking, seed=course.seed))
    await send_all(ask, warm, Manner(concurrency=max(len(warm.requests), 1)))


async def _counted(target: Target, workload: Workload, asking: Asking, manner: Manner) -> Traffic:
    """Send the workload, and add the prompt tokens that the index promised during the run."""
    ask = await target.asking(workload, asking)
    before = await target.promised_tokens()
    traffic = await send_all(ask, workload, manner)
    after = await target.promised_tokens()
    if before is None or after is None or after < before:
        return traffic
    return replace(traffic, promised_tokens=after - before)


def _check_fits(workload: Workload, max_model_len: int | None) -> None:
    if not workload.requests:
        raise ValueError(f"the workload {workload.name} contains no requests")
    if max_model_len is not None and (most := longest(workload)) > max_model_len:
        raise ValueError(
            f"the workload {workload.name} has a request of {most} tokens, output included; the model allows at most "
            f"{max_model_len}"
        )
