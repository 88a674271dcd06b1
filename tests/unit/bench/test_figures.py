"""The arithmetic of the smaller benches: ratios, rates, percentiles and floors follow from what was measured."""

import argparse
import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.deploy.bench.measures import Objectives, Sample
from blockyard.deploy.bench.summaries import Traffic, summary

from bench import kv_accuracy, lora
from bench.cluster.figures import figures_of, floors_of
from bench.cluster.systems import OURS, our_role
from bench.cluster.trials import Idle, Results, Trial
from bench.cluster.usage import Usage
from bench.engine import speculation
from bench.engine.peers.protocol import Course
from bench.engine.speculation import CONTROL, NONE, cells_of
from bench.engine.systems import Trial as EngineTrial
from bench.peers.dynamo import check_trace, read_answer
from bench.quantise import peers
from bench.reporting import percentile
from bench.router import systems
from bench.router.figures import added, middle, spread, throughput_shares
from bench.router.flame import shares
from bench.router.load import Delays, Receipt, delays, num_tokens_in
from bench.router.pace import Running, Stamps
from bench.router.peers import event
from bench.router.trials import LoadTrial
from bench.transfer.__main__ import floors_of as transfer_floors
from bench.transfer.__main__ import text_of as transfer_text
from bench.transfer.harm import FRAME_BYTES, KINDS, REPLY_BYTES, Harm

MILLISECOND = 1_000_000


PEER, OTHER_PEER = "vllm, sglang-router cache_aware", "vllm, sglang-router round_robin"


def cluster_trial(seed: int, *, seconds: float, first: float, cached: int, cpu: float) -> Trial:
    """Make a trial of one request with 11 tokens and a prompt of 100."""
    sample = Sample(number=0, due=0.0, sent=0.0, arrivals=[first, seconds])
    sample = replace(sample, prompt_tokens=100, output_tokens=11, cached_tokens=cached)
    cores = {"workers": cpu - 1, "router": 1.0}
    return Trial(
        about="one request",
        seed=seed,
        summary=summary(Traffic(samples=[sample], seconds=seconds), Objectives()),
        usage=Usage(wall_seconds=seconds, cpu_seconds=cores, foreign_cores=0.0),
    )


def cluster_results(seeds: int) -> Results:
    results = Results()
    for seed in range(seeds):
        for name, seconds, first, cached, cpu in (
            (OURS, 5.0, 1.0, 80, 6.0),
            (PEER, 10.0, 4.0, 60, 12.0),
            (OTHER_PEER, 11.0, 2.0, 90, 10.0),
        ):
            one = cluster_trial(seed, seconds=seconds, first=first, cached=cached, cpu=cpu)
            results.add("float32", "chat", name, one)
        usage = Usage(wall_seconds=10.0, cpu_seconds={"workers": 0.1, "ray": 0.9}, foreign_cores=0.0)
        idle = Idle(usage=usage, memory_bytes={"workers": 2**30, "ray": 2**20})
        results.idle.setdefault("float32", {}).setdefault(OURS, []).append(idle)
    return results


def test_each_figure_of_a_cluster_is_judged_beside_the_peer_that_is_best_in_it() -> None:
    figures = figures_of(cluster_results(3))
    chat = figures["whole_path"]["float32"]["chat"]
    assert chat["ratios"] == {
        "output_tokens_per_second": 2.0,
        "first_token_p50_ms": 0.5,
        "cpu_seconds": 0.6,
        "hit_rate": pytest.approx(-0.1),
    }
    assert chat["systems"][OURS]["median"]["cpu_seconds_by_role"] == {"router": 1.0, "workers": 5.0}
    assert figures["idle"]["float32"][OURS]["cores_by_role"] == {"ray": 0.09, "workers": 0.01}
    assert {floor.name: floor.holds for floor in floors_of(figures)} == {
        "tokens/s over the best peer's, chat, float32": True,
        "first token p50 over the best peer's, chat, float32": True,
        "hit rate less the best peer's, chat, float32": False,
        "CPU seconds over the best peer's, chat, float32": True,
        "idle cores, float32": False,
    }


def test_a_run_without_peers_or_with_few_seeds_is_not_judged() -> None:
    results = Results()
    results.add("float32", "chat", OURS, cluster_trial(0, seconds=5.0, first=1.0, cached=80, cpu=6.0))
    assert floors_of(figures_of(results)) == []


def test_roles_are_told_by_command_lines() -> None:
    for command, role in (
        (["ray::WorkerActor.until_stopped"], "workers"),
        (["ray::RouterActor"], "router"),
        (["python", "-P", "-m", "blockyard.router.tokenizing.process", "59"], "tokenizer"),
        (["/x/raylet", "--raylet_socket_name=/tmp/x"], "ray"),
        ([], "ray"),
    ):
        assert our_role(command) == role


def test_a_delay_has_nothing_of_the_workers_own_time() -> None:
    receipt = Receipt(7, sent=0, messages=[(50 * MILLISECOND, 1), (95 * MILLISECOND, 2)], num_tokens=3)
    emitted = [48 * MILLISECOND, 68 * MILLISECOND, 88 * MILLISECOND]
    ways = delays([receipt], {7: {"arrived": 3 * MILLISECOND, "emitted": emitted}})
    assert (ways.first, ways.later) == ([3 + 2], [27, 7])
    with pytest.raises(ValueError, match="3 tokens, but 1 were emitted"):
        delays([receipt], {7: {"arrived": 0, "emitted": [1]}})


def test_percentiles_are_values_and_a_spread_is_of_the_repeats_medians() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    row = spread([[1.0, 2.0, 3.0], [4.0, 5.0, 60.0]])
    assert row == {"p50": 3.0, "p99": 60.0, "p50_lowest": 2.0, "p50_highest": 5.0}
    assert middle([3.0, 1.0, 2.0]) == {"median": 2.0, "lowest": 1.0, "highest": 3.0}


def test_what_a_router_adds_is_its_way_less_the_one_without_it() -> None:
    ways = {way: {"p50": 1.0, "p99": 2.0} for way in ("first", "later")}
    slower = {way: {"p50": 1.5, "p99": 4.0} for way in ("first", "later")}
    assert added({systems.OURS: slower, systems.SESSION: ways}) == {
        systems.OURS: {"first_p50": 0.5, "first_p99": 2.0, "later_p50": 0.5, "later_p99": 2.0}
    }


def test_what_tls_costs_is_told_by_pairs_of_one_moment() -> None:
    """The machine halves its speed between the pairs, which takes nothing from the ratio."""

    def trial(tokens_per_second: float, tokens_per_cpu_second: float) -> LoadTrial:
        ways, rest = Delays(first=[1.0], later=[1.0]), {"cores": 1.0, "tokens_per_message": 1.0}
        rates = {
            "tokens_per_second": tokens_per_second,
            "tokens_per_cpu_second": tokens_per_cpu_second,
        }
        return LoadTrial(ways=ways, **rates, **rest, foreign_cores=0.0, stalls={})

    ours, plain = [trial(99, 90), trial(50, 45)], [trial(100, 100), trial(50, 50)]
    found = throughput_shares({systems.OURS: ours, systems.PLAINTEXT: plain})
    rates = found[systems.PLAINTEXT]
    assert rates["tokens_per_second"] == {"median": 0.995, "quartiles": [0.99, 1.0], "pairs": 2}
    assert rates["tokens_per_cpu_second"]["median"] == 0.9
    assert systems.BEFORE not in found


def test_a_recursive_function_counts_once_in_a_stack() -> None:
    seen = shares(["a;b;b 3", "a;c 1"])
    assert (seen.own, seen.total) == ({"b": 0.75, "c": 0.25}, {"a": 1.0, "b": 0.75, "c": 0.25})


def test_the_client_reads_each_token_of_the_http_workers_events() -> None:
    running = Running(3, 2, Stamps(arrived=0))
    stream = b"".join(event(running, running.next_token(now)) for now in (1, 2))
    *events, rest = stream.split(b"\n\n")
    assert (num_tokens_in(events), events[-1], rest) == (2, b"data: [DONE]", b"")


ANSWER = bytes(range(256)) * ((REPLY_BYTES + 3 * FRAME_BYTES) // 256)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [0, REPLY_BYTES + FRAME_BYTES, REPLY_BYTES + 2 * FRAME_BYTES + 77])
@pytest.mark.parametrize("chunk", [1000, len(ANSWER)])
def test_harm_changes_the_stream_from_its_position_on(kind: str, position: int, chunk: int) -> None:
    harm, passed, answer = Harm(kind, position, bit=3), b"", ANSWER
    for offset in range(0, len(answer), chunk):
        data, goes_on = harm.pass_on(answer[offset : offset + chunk], offset)
        passed += data
        if not goes_on:
            break
    assert harm.first_wrong is not None
    assert position <= harm.first_wrong <= position + 1
    assert passed[: harm.first_wrong] == answer[: harm.first_wrong]
    assert passed[: harm.first_wrong + 1] != answer[: harm.first_wrong + 1]
    assert harm.num_intact == max(harm.first_wrong - REPLY_BYTES, 0) // FRAME_BYTES
    assert goes_on is (kind != "cut")
    assert Harm("reversed", 3, bit=0).pass_on(b"abca", 0) == (b"abca", True)
    assert Harm("reversed", 3, bit=0).num_intact == inf


def test_floors_and_text_follow_from_the_figures() -> None:
    gaps = {"p50_ms": 80.0, "p99_ms": 100.0, "gaps": 300}
    end = {"without": gaps, "with": gaps, "p99_ratio": 1.05, "p50_ratio": 1.0}
    rate = {"configured_mbits": 10, "megabytes": 5.0, "mbits": 7.0, "ratio": 0.7, "setup_ms": [3.0, 1.0]}
    figures = {
        "first": {
            "seconds": {"recomputed": 10.0, "pulled": 0.2},
            "megabytes": 100.0,
            "other_tokens": 0,
            "pulled_to_recomputed": 0.02,
            "pulled_to_host_hit": 1.5,
            "foreign_cores": 0.1,
        },
        "decodes": {"pulls": 7, "source": end, "destination": end, "foreign_cores": 0.1},
        "harm": {
            "tried": 10_000,
            "kinds": {"cut": 10_000},
            "ends": {"cut": 10_000},
            "wrong_tokens": 0,
            "blocks_used": 5,
            "harmed_blocks_used": 0,
        },
        "links": {"rates": [rate]},
    }
    assert [floor.name for floor in transfer_floors(figures) if not floor.holds] == [
        "time to the first token, pulled / local host hit",
        "reported rate of 10 Mbit/s, off by",
    ]
    options = {"plaintext": False, "repeats": 3, "beside": "nothing", "model": "llama-166m"}
    text = transfer_text(figures, argparse.Namespace(dtype="float32", device="cpu", **options))
    for row in ("| pulled | 200 |", "10,000 cut", "| 10 | 5.0 | 7.0 | 3.0 | 1.0 |"):
        assert row in text
    assert transfer_floors({}) == []


def test_a_turn_that_disturbs_all_arms_alike_changes_no_ratio() -> None:
    cells = cells_of({NONE: [10.0, 2.0, 10.0], "0.6": [15.0, 3.0, 15.0], CONTROL: [10.0, 2.0, 10.0]})
    assert (cells.control, cells.spread, cells.shares) == (1.0, 0.0, {"0.6": 1.5})
    assert [floor.floor for floor in speculation.floors_of({"8": cells})] == [0.02, 0.98]


def test_a_noisy_control_lowers_the_floor_of_its_cells_and_breaks_its_own() -> None:
    cells = cells_of({NONE: [10.0] * 3, "0": [9.7] * 3, CONTROL: [9.4] * 3})
    spread_floor, cell = speculation.floors_of({"8": cells})
    assert (cells.spread, cell.value, cell.floor) == pytest.approx((0.06, 1.0, 0.92))
    assert not spread_floor.holds
    varying = cells_of({NONE: [1.0] * 4, CONTROL: [0.8, 1.0, 1.0, 1.2]})
    assert varying.control == 1.0
    assert varying.spread == pytest.approx(1.86 * 0.1 / 2)


def test_a_loss_beyond_the_noise_breaks_its_floor() -> None:
    cells = cells_of({NONE: [10.0] * 3, "0": [9.6] * 3, CONTROL: [9.9] * 3})
    spread_floor, cell = speculation.floors_of({"8": cells})
    assert (spread_floor.holds, cell.holds) == (True, False)


def test_a_ratio_of_adapters_is_the_geometric_mean_of_both_orders() -> None:
    orders = [
        {arm: lora.Rates(decode=[rate, 2 * rate], prefill=[1.0, 1.0]) for arm, rate in rates.items()}
        for rates in (
            {"none": 1.0, "slots": 1.0, "adapters": 0.8},
            {"none": 1.0, "slots": 1.0, "adapters": 1.25},
        )
    ]
    assert lora.ratio(orders, "adapters", "decode") == pytest.approx(1.0)
    assert lora.ratio(orders[:1], "adapters", "decode") == pytest.approx(0.8)


def of_llama_cpp(load: Any, first: float, seconds: float) -> EngineTrial:
    course = Course(submitted=0.0, first=first, last=seconds, num_tokens=load.output_tokens)
    return EngineTrial(courses=(course,) * load.sequences, foreign_cores=0.0, cores=1.0)


def test_llama_cpp_is_compared_round_by_round_by_the_rate_of_prompt_or_decodes(tmp_path: Path) -> None:
    decode, batch, prompt = peers.LOADS
    assert decode.rate(of_llama_cpp(decode, 2.0, 4.0)) == pytest.approx((decode.output_tokens - 1) / 2)
    assert batch.rate(of_llama_cpp(batch, 1.0, 2.0)) == pytest.approx(16 * (batch.output_tokens - 1))
    assert prompt.rate(of_llama_cpp(prompt, 0.5, 0.5)) == pytest.approx(512 / 0.5)
    files = peers.Files(full=tmp_path, w4a16=tmp_path, gguf=tmp_path)
    for kind in peers.TYPES:
        (tmp_path / f"{kind}.gguf").write_bytes(b"x")
    exact, measured = peers.systems_of(files, Path("python"), 2)
    assert all(system.env["OMP_NUM_THREADS"] == "2" for system in (*exact, *measured))
    assert {name for pair in peers.PAIRS for name in pair} == {system.name for system in measured}
    rates = {
        load.name: {
            system.name: [
                of_llama_cpp(load, 1.0, 2.0 if system.name in peers.OURS else 2.0 + delay)
                for delay in (1.0, 3.0, 2.0)
            ]
            for system in measured
        }
        for load in peers.LOADS
    }
    figures = peers.figures_of(rates)
    ratio = figures[peers.JUDGED]["ratios"]["blockyard W4A16 / llama.cpp Q4_0"]
    assert ratio == {"median": 3.0, "lowest": 2.0, "highest": 4.0, "pairs": 3, "undisturbed": 3}
    floors = [floor.value for floor in peers.floors_of(figures, 0.75)]
    assert floors == [0.75, *[3.0] * len(peers.PAIRS)]
    text = peers.text_of(figures, files, "")
    assert "| blockyard int8 / llama.cpp Q8_0 | **3.00** (2.00-4.00; 3) |" in text


def test_capacity_of_a_cache_grows_with_the_head_and_what_a_cpu_cannot_measure_is_said() -> None:
    capacity = [kv_accuracy.capacity_of("int8", size) for size in (32, 64, 128)]
    assert capacity == sorted(set(capacity))
    accuracy = kv_accuracy.Accuracy(
        perplexity=1.0, mean_logit_error=0.0, max_logit_error=0.0, same_first_choice=1.0
    )
    few, every = (
        kv_accuracy.text_of(dict.fromkeys(cases, accuracy), torch.zeros(1, 1), "nothing")
        for cases in (kv_accuracy.CASES[:6], kv_accuracy.CASES)
    )
    assert "float32, KV in float32, linears in int8: not measured" in few
    assert "not measured" not in every


SUMMARY = {
    "completed_requests": 2,
    "prefix_cache_reused_ratio": 0.25,
    "median_ttft_ms": 30.0,
    "p99_ttft_ms": 90.0,
    "duration_ms": 5030.0,
}
GOOD = {"timestamp": 0, "input_length": 40, "output_length": 2, "hash_ids": [0, 1, 2]}


def test_a_trace_for_dynamo_may_end_its_prompts_within_a_block_and_is_refused_by_line() -> None:
    def trace(*changes: dict[str, Any]) -> str:
        return "\n".join(json.dumps(GOOD | change) for change in changes)

    assert check_trace(trace({"input_length": 48}, {"input_length": 33}), 16) == 2
    for text, told in (
        (trace({}, {"input_length": 32}), "line 2 has 3 hash_ids, but 32 tokens in blocks of 16"),
        (trace({}, {"input_length": 49}), "line 2 has 3 hash_ids, but 49 tokens in blocks of 16"),
        (trace({"session_id": "a"}), "line 1 must have just the fields"),
        ("", "no requests"),
        ("not json", "line 1 is not JSON"),
        ("[1]", "line 1 must have just the fields"),
        (trace({"input_length": 0}), "input_length"),
        (trace({"input_length": "40"}), "input_length"),
        (trace({"hash_ids": 3}), "hash_ids"),
    ):
        with pytest.raises(ValueError, match=told):
            check_trace(text, 16)
    with pytest.raises(ValueError, match="trace_block_tokens must be at least 1, not 0"):
        check_trace(trace({}), 0)


def test_an_answer_of_dynamo_counts_only_if_it_served_everybody() -> None:
    told = json.dumps({"summary": SUMMARY, "version": "1.6.1"})
    result = read_answer(told, 2)
    assert (result.reuse, result.ttft_p50_ms, result.ttft_p99_ms) == (0.25, 30.0, 90.0)
    assert (result.duration_s, result.raw) == (5.03, {**SUMMARY, "version": "1.6.1"})
    for text, requests, why in (
        (told, 3, "served 2 of 3 requests"),
        ('{"error": "block_size must be positive"}', 2, "block_size must be positive"),
        ("Killed", 2, "did not answer with JSON: 'Killed'"),
    ):
        with pytest.raises(ValueError, match=why):
            read_answer(text, requests)
