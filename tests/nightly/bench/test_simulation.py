"""Effects that show only in longer simulations: small pools, slow and new workers, prefill workers, several routers."""

import json
from dataclasses import replace
from pathlib import Path

from blockyard.deploy.bench.workloads.requests import PlannedRequest, Run, Workload

from bench.placement.simulation.profile import HardwareProfile
from bench.placement.simulation.simulator import Result, Setup, simulate
from bench.placement.simulation.study import Job, Load, kept_file, run_jobs
from bench.placement.simulation.workloads import independent, shared_prefix, uniform_groups

SMALL = HardwareProfile(max_model_len=4096, memory_bytes=23e9)
"""A pool that evicts under a few dozen prompts."""


def request(number: int, at: float, prompt: Run, output: int = 8) -> PlannedRequest:
    return PlannedRequest(
        number=number, arrival_seconds=at, prompt=(prompt,), output=Run(10**6 * (number + 1), output)
    )


def test_a_pool_that_is_too_small_for_all_groups_loses_reuse_and_no_request() -> None:
    load = shared_prefix(20.0, 6.0, 3, groups=40, system_tokens=2000, question_tokens=100, output_tokens=20)
    roomy = simulate(load, Setup(num_workers=2))
    tight = simulate(load, Setup(num_workers=2, profile=SMALL))
    assert tight.reuse < 0.8 * roomy.reuse
    assert tight.num_requests == roomy.num_requests == len(load.requests)


def test_a_slow_worker_gets_less_than_with_uniform_speeds_and_first_tokens_come_earlier() -> None:
    load = uniform_groups(20.0, 6.0, 1)
    setup = Setup(num_workers=3, slowness=(6.0,))
    known, uniform = (simulate(load, replace(setup, has_uniform_speeds=flag)) for flag in (False, True))
    assert known.ttft_mean < uniform.ttft_mean
    assert known.ttft_p99 < uniform.ttft_p99


def test_a_worker_that_joins_takes_part_from_then_on() -> None:
    load = uniform_groups(20.0, 4.0, 1)
    alone = simulate(load, Setup(num_workers=1))
    joined = simulate(load, Setup(num_workers=2, num_joiners=1, join_seconds=1.0))
    assert joined.largest_share < 0.9
    assert joined.busy_max < alone.busy_max


def test_a_prefill_worker_keeps_long_prompts_from_pausing_the_decodes_of_another() -> None:
    streams = [request(number, 0.02 * number, Run(10_000 * number, 64), output=400) for number in range(32)]
    prompts = [
        request(32 + number, 1.0 + 0.5 * number, Run(10**8 + 20_000 * number, 16_000)) for number in range(4)
    ]
    load = Workload(name="test", about="test", requests=(*streams, *prompts))
    profile = HardwareProfile(host_cache_bytes=16 * 2.0**30, link_bytes_per_second=40e9)
    setup = Setup(num_workers=2, profile=profile, pulls=True)
    together, apart = simulate(load, setup), simulate(load, replace(setup, num_prefill_workers=1))
    assert (together.num_splits, apart.num_splits) == (0, 4)
    assert apart.pause_p50 < together.pause_p50 / 2
    assert simulate(load, replace(setup, role="decode", num_prefill_workers=1)).num_splits == 4


def burst(rate: float) -> Workload:
    """Make about 150 requests over 15 groups."""
    return independent(
        "burst", "15 groups", rate, 150 / rate, 3,
        systems=(Run(0, 2000),) * 15, prompt_tokens=(40, 40), output_tokens=(4, 8),
    )  # fmt: skip


def outcome(rate: float, *, num_routers: int = 1, lag_seconds: float = 0.0) -> Result:
    setup = Setup(num_workers=4, num_routers=num_routers, index_lag_seconds=lag_seconds, seed=3)
    return simulate(burst(rate), setup)


def test_eight_routers_with_an_index_that_is_late_reuse_what_one_does_in_a_burst() -> None:
    """The index learns of a prefix only when it is computed, and by then the burst is over."""
    one = outcome(150.0)
    assert one.reuse >= 0.97 * one.ideal_reuse, one
    for lag_seconds in (0.0, 5.0):
        eight = outcome(150.0, num_routers=8, lag_seconds=lag_seconds)
        assert eight.reuse >= 0.97 * one.reuse, (one, eight)
        assert eight.ttft_mean <= 1.1 * one.ttft_mean, (one, eight)
    assert outcome(30.0, lag_seconds=5.0).reuse >= 0.97 * outcome(30.0).reuse


def test_a_study_goes_on_with_the_results_that_it_kept(tmp_path: Path) -> None:
    load = Load(workload="uniform-groups", rate=2, seconds=1, num_workers=2)
    result = Job(load=load, setup=Setup()).run()
    jobs = [Job(load=load, setup=Setup(seed=seed), tag="prefix") for seed in range(2)]
    kept_file(tmp_path, jobs[0]).write_text(json.dumps(replace(result, reuse=0.25).as_dict()))
    found = {job.setup.seed: one for job, one in run_jobs(jobs, processes=1, keep=tmp_path)}
    assert found[0].reuse == 0.25
    again = {job.setup.seed: one for job, one in run_jobs(jobs, processes=1, keep=tmp_path)}
    assert again == found
