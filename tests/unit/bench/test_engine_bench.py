"""The engine bench: its clock, its ratios and floors, its report, and a run that a signal ends."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blockyard.worker.model.config import load_config

import bench.engine.__main__ as main
from bench.engine.__main__ import check_memory, kv_bytes_of, measure, parse
from bench.engine.figures import (
    GOALS,
    MIN_REPEATS,
    Results,
    figures_of,
    floors_of,
    not_judged,
    tokens_per_second,
)
from bench.engine.limit import roofline_tokens_per_second
from bench.engine.peers import protocol
from bench.engine.peers.protocol import Course, Request, drive
from bench.engine.plot import present
from bench.engine.report import text_of, write
from bench.engine.shapes import model_folder
from bench.engine.systems import System, Trial, our_systems
from bench.engine.workloads import WORKLOADS, requests_of
from bench.kernels.timing import Machine
from bench.plots import draw
from bench.profile.roofline import used_weights
from bench.proof import Proof

GIB = 2**30


def workload(name: str, repeat: int = 0) -> list[Request]:
    return requests_of(name, vocab_size=4096, rate=2.0, repeat=repeat)


def test_workloads_are_as_reports_describe_them_and_another_in_each_repeat() -> None:
    mixed, prefix = workload("mixed"), workload("prefix")
    assert [request.max_tokens for request in mixed] == [32, 128, 64, 256] * 8
    assert all(20 <= len(request.token_ids) <= 200 and not request.arrival_seconds for request in mixed)
    assert len({tuple(request.token_ids[:512]) for request in prefix}) == 1
    assert len({tuple(request.token_ids[:513]) for request in prefix}) > 16
    arrivals = [each.arrival_seconds for each in requests_of("serve", vocab_size=99, rate=50.0, repeat=0)]
    assert arrivals == sorted(arrivals)
    assert 0.3 < arrivals[-1] < 3.0
    assert [len(request.token_ids) for request in workload("long")] == [64] * 16 + [8192]
    nano = workload("nano")
    assert len(nano) == 256
    assert all(100 <= n <= 1024 for each in nano for n in (len(each.token_ids), each.max_tokens))
    for name in WORKLOADS:
        assert workload(name) == workload(name)
        assert workload(name)[0].token_ids != workload(name, repeat=1)[0].token_ids


class OneTokenAStep:
    """An engine that gives each request it has one token a step."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.most = 0

    def add(self, number: int, token_ids: list[int], max_tokens: int) -> None:
        self.left[number] = max_tokens

    def step(self) -> Iterable[tuple[int, Sequence[int]]]:
        self.most = max(self.most, len(self.left))
        came = [(number, [number]) for number in self.left]
        self.left = {number: left - 1 for number, left in self.left.items() if left > 1}
        return came


class VirtualTime:
    """Takes the place of the module `time`. A look at the clock takes a millisecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.001
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_driven_engine_is_given_requests_when_they_arrive_and_turned_until_all_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "time", VirtualTime())
    requests = [Request(0.1, [1], 2), Request(0.0, [2], 3), Request(0.1, [3], 1)]
    engine = OneTokenAStep()
    courses = drive(engine, requests)
    assert [course.num_tokens for course in courses] == [2, 3, 1]
    assert [course.head for course in courses] == [[0, 0], [1, 1, 1], [2]]
    assert engine.most == 2  # the second was done before the others came
    assert courses[1].last < 0.1 <= min(courses[0].first or 0.0, courses[2].first or 0.0)


def test_a_course_knows_its_longest_pause() -> None:
    course = Course(submitted=0.0)
    for now in (1.0, 1.5, 4.0, 4.2):
        course.take([7], now)
    assert (course.first, course.last, course.longest_pause, course.num_tokens) == (1.0, 4.2, 2.5, 4)


def trial(seconds: float, head: int = 5, foreign: float = 0.1) -> Trial:
    course = Course(submitted=0.0, first=seconds / 2, last=seconds, num_tokens=10, head=[head])
    return Trial(courses=(course,), foreign_cores=foreign, cores=1.5)


def results() -> Results:
    rows = {
        "blockyard torch": [trial(1.0), trial(2.0)],
        "blockyard, nothing shared": [trial(8.0), trial(8.0)],
        "vllm": [trial(2.0), trial(1.0, head=6)],
    }
    about = {"about": "Some.", "requests": 1, "prompt_tokens": 4, "output_tokens": 10}
    system = {"versions": {"torch": "2"}, "notes": "", "load_seconds": 1.0}
    return Results(
        trials={"prefix": rows},
        about={"prefix": about},
        systems={**dict.fromkeys(rows, system), "openvino": {"absent": "no Python was given for it"}},
        ours=("blockyard torch", "blockyard, nothing shared"),
    )


SETTING = {
    "report": "engine",
    "model": "m",
    "device": "cpu",
    "device_name": "2 CPU cores",
    "threads": 2,
    "repeats": MIN_REPEATS,
    "proven": "9 tests passed",
}


def test_ratios_are_of_pairs_in_the_same_repeat() -> None:
    figures = figures_of({"float32": results()}, SETTING)["runs"]["float32"]["workloads"]["prefix"]
    ratio = figures["ratios"]["blockyard torch"]["vllm"]
    assert ratio == {"median": 1.25, "lowest": 0.5, "highest": 2.0, "pairs": 2, "undisturbed": 2}
    assert figures["equal_first_tokens"]["vllm"] == 0.5
    assert tokens_per_second(trial(4.0)) == 2.5


@pytest.mark.parametrize(("num_calm", "median"), [(3, 2.0), (2, 1.0)])
def test_pairs_that_something_disturbed_are_left_out_where_three_others_remain(
    num_calm: int, median: float
) -> None:
    measured = results()
    calm = [trial(1.0)] * num_calm
    disturbed = [trial(2.0, foreign=0.2)] * 4
    measured.trials["prefix"] = {
        "blockyard torch": [*calm, *disturbed],
        "vllm": [trial(2.0)] * (num_calm + 4),
    }
    figures = figures_of({"float32": measured}, SETTING)["runs"]["float32"]["workloads"]["prefix"]
    ratio = figures["ratios"]["blockyard torch"]["vllm"]
    assert (ratio["median"], ratio["undisturbed"], ratio["pairs"]) == (median, num_calm, num_calm + 4)


def test_floors_are_of_what_was_there_to_be_compared_and_the_rest_is_named_as_not_judged() -> None:
    figures = figures_of({"float32": results()}, SETTING)
    assert [(floor.value, floor.floor, floor.holds) for floor in floors_of(figures)] == [
        (6.0, 5.0, True),
        (1.25, 1.15, True),
    ]
    assert "mixed, float32: blockyard torch / openvino-genai, median pair, at least 1" in not_judged(figures)
    on_cpu = [goal for goal in GOALS if goal[-1] == "cpu"]
    assert len(not_judged(figures)) + len(floors_of(figures)) == len(on_cpu) < len(GOALS)


def test_no_goal_is_judged_by_too_few_repeats() -> None:
    few = figures_of({"float32": results()}, {**SETTING, "repeats": MIN_REPEATS - 1})
    assert floors_of(few) == []
    assert len(not_judged(few)) == len([goal for goal in GOALS if goal[-1] == "cpu"])


def test_a_goal_holds_for_each_variant_of_a_peer() -> None:
    measured = results()
    seconds = {"blockyard cpu": 1.0, "openvino-genai": 1.0, "openvino-genai, exact KV": 0.5}
    measured.trials = {"mixed": {name: [trial(its)] for name, its in seconds.items()}}
    measured.about, measured.ours = {"mixed": measured.about["prefix"]}, ("blockyard cpu",)
    floors = floors_of(figures_of({"float32": measured}, SETTING))
    assert [(floor.name, floor.value, floor.holds) for floor in floors] == [
        ("mixed, float32: blockyard cpu / openvino-genai, median pair", 1.0, True),
        ("mixed, float32: blockyard cpu / openvino-genai, exact KV, median pair", 0.5, False),
    ]


def test_a_roofline_is_of_prompts_whose_beginning_counts_once_and_of_all_decode_steps() -> None:
    model = load_config(model_folder("demo", "float32", Path(), with_weights=True))
    weights, head = used_weights(model), model.vocab_size * model.hidden_size
    kv_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 4
    requests = [Request(0.0, [1, 2, 3, 4], 3), Request(0.0, [1, 2, 3, 5, 6], 2)]
    slow_matmul = Machine(copy_bytes_per_second=1e30, matmul_flops_per_second=1e9)
    slow_memory = Machine(copy_bytes_per_second=1e9, matmul_flops_per_second=1e30)
    # Six tokens of prompts, two of which are answered; then a step of both and one of the first.
    flops = 2 * (6 * (weights - head) + 2 * head) + 2 * weights * (2 + 1)
    num_bytes = 2 * 4 * weights + kv_bytes * ((3 + 2 + 3) + (3 + 3))
    for machine, seconds in ((slow_matmul, flops / 1e9), (slow_memory, num_bytes / 1e9)):
        rate = roofline_tokens_per_second(requests, model, "float32", machine)
        assert rate == pytest.approx(5 / seconds)
    late = [*requests, Request(0.5, [9], 1)]
    assert roofline_tokens_per_second(late, model, "float32", slow_memory) is None


def test_a_goal_beside_the_roofline_is_a_gpus_and_of_our_first_row() -> None:
    measured = results()
    measured.trials = {"nano": {"blockyard triton": [trial(2.0), trial(2.5)]}}
    measured.ours = ("blockyard triton",)
    measured.about = {"nano": {**measured.about["prefix"], "roofline_tokens_per_second": 10.0}}
    measured.machine = {"copy_gb_per_second": 4000.0, "matmul_tflops_per_second": 750.0}
    figures = figures_of({"bfloat16": measured}, {**SETTING, "device": "cuda"})
    (floor,) = floors_of(figures)
    assert floor.name == "nano, bfloat16: blockyard triton / the roofline, median"
    assert (floor.value, floor.floor, floor.holds) == (0.45, 0.5, False)
    text = text_of(figures)
    assert "Shares of the roofline, 10 tokens/s: blockyard triton 45%." in text
    assert "4,000.0 GB/s and F, the matmul rate, is 750 TFLOP/s" in " ".join(text.split())
    assert floors_of(figures_of({"bfloat16": measured}, SETTING)) == []


def test_a_report_names_who_was_absent_and_has_a_json_twin(tmp_path: Path) -> None:
    path = write(figures_of({"float32": results()}, SETTING), tmp_path)
    text = path.read_text(encoding="utf-8")
    assert "openvino: not measured (no Python was given for it)." in text
    assert "**1.25** (0.50-2.00; 2 of 2: all)" in text
    missed = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["figures"]["not_judged"]
    assert missed
    assert all(f"\n- {line}\n" in text for line in missed)


def test_a_report_of_too_few_repeats_says_so() -> None:
    few, enough = (figures_of({"float32": results()}, SETTING | {"repeats": repeats}) for repeats in (2, 3))
    assert "2 repeats. **Fewer than 3 repeats: too few for a claim.** Proven" in text_of(few)
    assert "Fewer than" not in text_of(enough)


NOTHING = Results(
    trials={"tiny": {}},
    about={"tiny": {"about": "Some.", "requests": 1, "prompt_tokens": 4, "output_tokens": 10}},
    systems={"blockyard triton": {"absent": "CUDA out of memory"}},
    ours=("blockyard triton",),
)


def test_a_run_in_which_nothing_of_ours_was_measured_is_kept_printed_and_drawn_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.engine", "--output", str(tmp_path)])
    monkeypatch.setattr(main, "proof_of", lambda *_, **__: Proof(proven="all"))
    monkeypatch.setattr(main, "run", lambda *_: NOTHING)
    printed: list[str] = []

    def spy(report: Path) -> bool:
        printed.append(capsys.readouterr().out)
        return draw(report)

    monkeypatch.setattr(main, "draw", spy)
    with pytest.raises(SystemExit, match="no figures for our own systems: blockyard triton in float32"):
        main.main()
    assert "blockyard triton: not measured (CUDA out of memory)." in printed[0]
    assert len(list(tmp_path.glob("*-engine.*"))) == (2 if find_spec("matplotlib") is None else 3)


def test_a_cache_of_ours_in_8_bits_is_named_and_has_no_goals() -> None:
    settings = {"model": "m", "kv_cache_dtype": "int8"}
    (system,) = our_systems(settings, backends=["cpu"], is_served=False, is_unshared=False)
    assert system.name == "blockyard cpu, KV in int8"
    figures = figures_of({"float32": results()}, {**SETTING, "kv_cache_dtype": "int8"})
    assert floors_of(figures) == []
    assert not_judged(figures) == []


@pytest.mark.parametrize(("num_runs", "kept"), [(4, 1), (5, 1), (6, 2)])
def test_a_run_ended_by_a_signal_keeps_the_repeats_that_all_systems_ended(
    num_runs: int, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two systems run the warm-up, and then each repeat."""
    calls, ended = count(1), list[str]()

    async def run(_: Sequence[Request]) -> Trial:
        if next(calls) > num_runs:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        return trial(1.0)

    @asynccontextmanager
    async def running(system: System, *_: object) -> AsyncIterator[Any]:
        try:
            yield SimpleNamespace(run=run, versions={}, notes="", load_seconds=0.0)
        finally:
            ended.append(system.name)

    monkeypatch.setattr(main, "running", running)
    monkeypatch.setattr(sys, "argv", ["bench.engine", "--workloads", "tiny,brief"])
    systems = [System(name=name, command=("x",), settings={}, is_ours=name == "a") for name in "ab"]
    results = asyncio.run(measure(parse(), systems, 100, tmp_path))
    assert results.is_cut_short
    assert {name: len(trials) for name, trials in results.trials["tiny"].items()} == {"a": kept, "b": kept}
    assert sorted(ended) == ["a", "b"]


def test_systems_share_the_memory_of_a_gpu_and_leave_some_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ["--kv-gib", "20", "--unshared", "--transformers", "continuous"]
    monkeypatch.setattr(sys, "argv", ["bench.engine", *options])
    arguments = parse()
    for memory_gib, kv_gib in ((None, 20), (78, 20), (60, 16)):
        assert kv_bytes_of(arguments, memory_gib and memory_gib * GIB, GIB) == kv_gib * GIB
    with pytest.raises(SystemExit, match="3 systems do not fit 12"):
        kv_bytes_of(arguments, 12 * GIB, GIB)
    check_memory(None)
    check_memory(2 * GIB)
    with pytest.raises(RuntimeError, match=r"leave 1\.0 GiB"):
        check_memory(GIB)


def test_a_picture_names_ours_first_and_leaves_out_who_was_absent() -> None:
    ours, theirs = [f"ours {n}" for n in range(5)], [f"theirs {n}" for n in range(5)]
    absent = {"vllm": {"absent": "so"}, "ours, served": {"absent": "too"}}
    systems = {name: {} for name in (*theirs, *ours)} | absent
    assert present({"ours": [*ours, "ours, served"], "systems": systems}) == [*ours, *theirs]
