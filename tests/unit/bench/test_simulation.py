"""The simulator in virtual time: what it says follows from its workload and its profile alone."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from blockyard.deploy.bench.workloads.mooncake import read_trace, write_trace
from blockyard.deploy.bench.workloads.requests import PlannedRequest, Run, Tokens, Workload, poisson

from bench.placement.simulation.mocker import MockerProfile
from bench.placement.simulation.profile import HardwareProfile
from bench.placement.simulation.simulator import INDEX_SECONDS, NETWORK_SECONDS, Setup, ideal_reuse, simulate
from bench.placement.simulation.workloads import GENERATORS, NUM_ADAPTERS, shared_prefix, uniform_groups


def workload(*requests: PlannedRequest) -> Workload:
    return Workload(name="test", about="test", requests=requests)


def request(number: int, at: float, *prompt: Run, output: int = 8, **more: int) -> PlannedRequest:
    return PlannedRequest(
        number=number, arrival_seconds=at, prompt=prompt, output=Run(10**6 * (number + 1), output), **more
    )


def test_a_lone_request_takes_what_the_profile_says() -> None:
    profile = HardwareProfile(name="plain", step_overhead_seconds=0.25)
    result = simulate(
        workload(request(0, 1.0, Run(0, 2000), output=5)), Setup(num_workers=1, profile=profile)
    )
    weights = profile.parameters * profile.parameter_bytes / profile.bandwidth_bytes_per_second
    prefill = 0.25 + profile.prefill_seconds(2000)
    decode = 0.25 + weights / profile.efficiency
    assert result.ttft_mean == pytest.approx(prefill + 2 * INDEX_SECONDS + 2 * NETWORK_SECONDS, rel=1e-6)
    assert result.token_gap_mean == pytest.approx(decode, rel=0.01)


def test_the_second_of_two_equal_prompts_reuses_all_but_its_last_block() -> None:
    prompt = Run(0, 1600)
    result = simulate(workload(request(0, 0.0, prompt), request(1, 5.0, prompt)), Setup(num_workers=4))
    assert result.reuse == pytest.approx((1600 - 16) / 3200)
    assert result.ideal_reuse == pytest.approx(result.reuse)
    assert result.largest_share == 1.0


def test_the_next_turn_finds_prompt_and_output_of_the_last_one() -> None:
    first = request(0, 0.0, Run(0, 640), output=64)
    second = replace(
        request(1, 2.0, *first.prompt, first.output, Run(5 * 10**6, 40)), follows=0, session="chat"
    )
    result = simulate(workload(first, second), Setup(num_workers=2))
    # The last token of an output is never computed, so the block that it fills is not cached.
    assert result.reuse == pytest.approx((640 + 64 - 16) / (640 + 744))
    assert result.ideal_reuse == pytest.approx(result.reuse)


def test_round_robin_gives_each_worker_its_turn_while_requests_wait() -> None:
    """They wait for over a second: longer than a placer takes to reconsider."""
    burst = workload(
        *(
            request(number, number / 100, Run(10**6 * number, 2000 + number * 37 % 500))
            for number in range(120)
        )
    )
    result = simulate(burst, Setup(num_workers=2, policy="round_robin"))
    assert result.ttft_p99 > 2.0
    assert result.largest_share == 0.5


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_every_request_of_every_workload_ends(name: str) -> None:
    load = GENERATORS[name](1.5, 1.5, 7)
    slots = {"num_adapters": NUM_ADAPTERS, "max_loras": 4} if name == "adapters" else {}
    result = simulate(load, Setup(num_workers=3, num_routers=2, **slots))
    assert result.num_requests == len(load.requests)
    assert 0.0 <= result.reuse <= result.ideal_reuse + 1e-9


def test_one_seed_is_one_result_and_another_is_not() -> None:
    results = [
        simulate(uniform_groups(20.0, 0.4, seed), Setup(num_workers=3, num_routers=2, seed=seed))
        for seed in (1, 1, 2)
    ]
    assert results[0] == results[1] != results[2]


def test_the_ideal_is_what_brute_force_over_all_that_came_before_finds() -> None:
    chance = Random(5)
    runs = [Tokens().run(48), Run(1000, 48), Run(2000, 48)]
    requests = [
        request(number, number, *(chance.choice(runs) for _ in range(chance.randint(1, 4))), output=33)
        for number in range(30)
    ]
    seen: list[list[int]] = []
    cached = 0
    for each in requests:
        prompt = each.token_ids()
        best = max((_common(prompt, other) for other in seen), default=0)
        cached += min(best // 16 * 16, (len(prompt) - 1) // 16 * 16)
        seen.append([*prompt, *range(each.output.base, each.output.base + each.output.length - 1)])
    assert ideal_reuse(requests, 16) == pytest.approx(cached / sum(each.prompt_tokens for each in requests))


def _common(left: list[int], right: list[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


def test_a_trace_that_was_written_comes_back_with_the_same_prefixes(tmp_path: Path) -> None:
    load = shared_prefix(5.0, 10.0, 1, groups=4, system_tokens=600, question_tokens=100, output_tokens=9)
    write_trace(load, tmp_path / "trace.jsonl", block_tokens=100)
    read = read_trace(tmp_path / "trace.jsonl", block_tokens=100)
    assert [each.prompt_tokens for each in read.requests] == [each.prompt_tokens for each in load.requests]
    assert ideal_reuse(read.requests, 4) == pytest.approx(ideal_reuse(load.requests, 4))


def test_half_of_a_trace_at_double_speed(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 1000 * n, "input_length": 5, "output_length": 1, "hash_ids": [n]} for n in range(10)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    read = read_trace(path, seconds=2.5, speed=2.0)
    assert [each.arrival_seconds for each in read.requests] == [0.0, 0.5, 1.0, 1.5, 2.0]


WHOLE = "must be a whole number of tokens, not"
MILLISECONDS = "timestamp must be milliseconds from 0 "


def test_an_entry_that_cannot_be_is_named_by_its_line(tmp_path: Path) -> None:
    good = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}
    path = tmp_path / "trace.jsonl"
    for change, told in (
        ({"input_length": 0}, "input_length must be at least 1, not 0"),
        ({"input_length": -5}, f"input_length {WHOLE} -5"),
        ({"input_length": 1e3}, f"input_length {WHOLE} 1000.0"),
        ({"input_length": 10**12}, "input_length 1000000000000 and output_length 1 are more than"),
        ({"output_length": -1}, f"output_length {WHOLE} -1"),
        ({"output_length": True}, f"output_length {WHOLE} True"),
        ({"hash_ids": 3}, "hash_ids must be a list of whole numbers"),
        ({"hash_ids": ["a"]}, "hash_ids must be a list of whole numbers"),
        ({"timestamp": 1e12}, "arrives 1e.09 s after the start"),
        *(({"timestamp": wrong}, MILLISECONDS) for wrong in (-1, float("nan"), 10**400, "0")),
    ):
        path.write_text(f"{json.dumps(good)}\n{json.dumps(good | change)}\n")
        with pytest.raises(ValueError, match=rf"^trace\.jsonl, line 2: {told}"):
            read_trace(path)
    path.write_text(f'{json.dumps(good)}\n{{"timestamp": 1}}\n')
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 2"):
        read_trace(path)


def test_a_profile_from_a_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text('{"name": "small", "num_layers": 16}')
    assert HardwareProfile.from_file(path).num_layers == 16
    for text, complaint in (
        ('{"layers": 3}', "layers"),
        ('{"num_layers": 0}', "num_layers must be above 0 .*, not 0"),
        ('{"memory_bytes": 1e10}', "max_model_len"),
        ("[]", "not an object"),
        ("{", "not JSON"),
        ('{"memory_bytes": "x"}', "memory_bytes must be a number, not 'x'"),
        ('{"memory_bytes": 2e10}', "memory_bytes 2e.10 .* resident_bytes 1.8e.10"),
        ('{"memory_bytes": 1e20}', "at most 4000000 blocks"),
        ('{"bandwidth_bytes_per_second": null}', "bandwidth_bytes_per_second must be a number, not None"),
        ('{"matmul_flops_per_second": NaN}', "matmul_flops_per_second must be above 0"),
        (f'{{"parameters": 1{"0" * 400}}}', "parameters must be above 0 and at most"),
        ('{"num_layers": 1.5}', "num_layers must be a whole number, not 1.5"),
        ('{"efficiency": true}', "efficiency must be a number, not True"),
        ('{"efficiency": 1.1}', "efficiency must be at most 1, not 1.1"),
        ('{"memory_utilization": 9}', "memory_utilization must be at most 1, not 9"),
        ('{"block_size": 17}', "block_size must be one of .*, not 17"),
        ('{"name": 5}', "name must be a string, not 5"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"^profile\.json: .*{complaint}"):
            HardwareProfile.from_file(path)
    path.write_text('{"mixed_step_seconds": null, "parameters": 8}')
    assert HardwareProfile.from_file(path).mixed_step_seconds is None


def test_the_mock_engine_takes_the_published_times() -> None:
    setup = Setup(num_workers=1, profile=MockerProfile(speedup_ratio=1.0))
    result = simulate(workload(request(0, 0.0, Run(0, 1024), output=2)), setup)
    prefill = 4.209989e-07 * 1024**2 + 1.518344e-02 * 1024 + 16.50142
    assert result.ttft_mean == pytest.approx(
        prefill / 1000 + 2 * INDEX_SECONDS + 2 * NETWORK_SECONDS, rel=1e-6
    )
    active = 1025 / 400_000
    assert result.token_gap_mean * 1000 == pytest.approx(-25.74 * active**2 + 54.01 * active + 5.74, rel=1e-3)


def test_arrivals_by_chance_come_at_their_rate() -> None:
    found = list(poisson(50.0, 100.0, Random(1)))
    assert found == sorted(found)
    assert 4700 < len(found) < 5300


def test_an_idle_worker_pulls_the_prefix_of_a_busy_one_and_the_first_token_comes_sooner() -> None:
    prefix = Run(0, 24_000)
    load = workload(
        request(0, 0.0, prefix),
        request(1, 4.0, prefix, Run(100_000, 60_000)),
        request(2, 4.1, prefix, Run(200_000, 100)),
    )
    profile = HardwareProfile(host_cache_bytes=16 * 2.0**30, link_bytes_per_second=40e9)
    alone = simulate(load, Setup(num_workers=2, profile=profile))
    pulling = simulate(load, Setup(num_workers=2, profile=profile, pulls=True))
    assert (alone.pulled, pulling.pulled) == (0.0, 24_000 / pulling.prompt_tokens)
    assert pulling.reuse > alone.reuse
    assert pulling.ttft_mean < alone.ttft_mean
