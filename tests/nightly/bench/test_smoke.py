"""Each bench that needs processes, as a command at its smallest size: its report has what the docs rely on."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.deploy.machine.redis_server import start_private_redis
from blockyard.deploy.settings.options import model_path
from blockyard.kernels.cpu.extension import load_extension
from blockyard.proto.naming.fingerprint import tokenizer_fingerprint

from bench.cluster.systems import OURS
from bench.kernels.__main__ import PROOFS
from bench.kv_accuracy import CASES, EXACT, Case, floors_of, held_out_rows, logits_of, measure
from bench.proof import RedTests, proof_of, prove
from bench.router.__main__ import MODEL, prompt
from bench.router.placement import PlacementTimes, placement_bench
from bench.router.processes import ROOT, running_workers
from bench.router.systems import engine_session, http_worker, our_router, over_http
from bench.router.trials import many_streams, one_stream, request_cost
from tests.unit.router.rig import waiting_for_redis

RUN_SECONDS = 240.0
STEP_SECONDS = 0.02


def figures_of(tmp_path: Path, module: str, *options: str, report: str) -> tuple[dict[str, Any], str]:
    """Run a command and return its figures and its text."""
    words = [sys.executable, "-m", module, *options, "--output", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = tmp_path.glob(f"*-{report}.json")
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    assert str(tmp_path) not in text
    assert f"```bash\npython -m {module} {' '.join(options)} --output .../{tmp_path.name}\n```" in text
    return figures, text


def test_our_own_cluster_is_measured_with_a_tiny_load(tmp_path: Path) -> None:
    figures, _ = figures_of(tmp_path, "bench.cluster", "--quick", "--idle-seconds", "1", report="cluster")
    (row,) = figures["figures"]["whole_path"]["float32"]["quick"]["systems"][OURS]["trials"]
    assert (row["failed"], row["output_tokens"]) == (0, 8 * 8)
    assert row["hit_rate"] > 0
    assert row["cpu_seconds_by_role"]["workers"] > 0
    assert figures["figures"]["idle"]["float32"][OURS]["memory_mib_by_role"]["router"] > 0


def test_engines_are_proven_measured_and_drawn(tmp_path: Path) -> None:
    options = ["--model", "demo", "--workloads", "tiny", "--repeats", "1", "--kv-gib", "0.1"]
    options += ["--prove", "tests/unit/worker/test_block_pool.py"]
    figures, text = figures_of(tmp_path, "bench.engine", *options, report="engine")
    absent = figures["figures"]["runs"]["float32"]["systems"]["vllm"]
    assert absent == {"absent": "no Python was given for it"}
    assert "Shares of the roofline, " in text
    assert next(tmp_path.glob("*.png")).stat().st_size > 10_000


async def test_a_router_process_and_workers_alone_are_measured_under_streams(tmp_path: Path) -> None:
    fingerprint, redis = tokenizer_fingerprint(Path(MODEL)), start_private_redis(tmp_path / "redis")
    try:
        async with running_workers("bench.router.workers", str(STEP_SECONDS), fingerprint) as workers:
            session = await one_stream(engine_session(workers, range(100)), num_requests=2, num_tokens=3)
            async with our_router(MODEL, workers, prompt, tmp_path, redis.url) as ours:
                alone = await one_stream(ours, num_requests=2, num_tokens=3)
                trial = await many_streams(ours, num_streams=4, seconds=0.5)
                http = await many_streams(over_http(ours, prompt), num_streams=4, seconds=0.5)
                cost = await request_cost(over_http(ours, prompt), 8, 3, at_once=4, idle_seconds=0.2)
        async with running_workers("bench.router.peers", str(STEP_SECONDS)) as peers:
            peer = await one_stream(http_worker(peers, prompt), num_requests=2, num_tokens=3)
    finally:
        redis.stop()
    for ways in (session, alone, peer):
        assert (len(ways.first), len(ways.later)) == (2, 4)
        assert min(ways.first + ways.later) > 0
    for streams in (trial, http):
        assert 0 < streams.tokens_per_second <= 2 * 4 / STEP_SECONDS
    assert cost.whole > 0
    assert trial.tokens_per_message >= 1
    assert 0 < trial.cores < 2
    assert list(trial.stalls) == ["burst", "streaming", "end"]
    assert all(0 <= stall.computing <= stall.late for stall in trial.stalls.values())


async def test_the_placement_path_finds_a_holder_of_the_prefix() -> None:
    times = PlacementTimes()
    with waiting_for_redis():
        async with placement_bench(seed=3) as bench:
            await bench.measure(times, calls=20)
    assert times.hits == len(times.whole) == 20
    assert all(len(part) == 20 for part in times.parts.values())


def test_kernels_measured_until_the_signal_are_reported_and_the_command_fails(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--backend", "torch", "--threads", "1", "--only", "linear", "--skip-proof")
    command = [sys.executable, "-m", "bench.kernels", *options, "--output", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline().endswith(" us\n")
        running.terminate()
        told, _ = running.communicate(timeout=100)
    assert running.returncode == 1
    assert "**Cut short: later cases" in told
    (short,) = tmp_path.glob("*-kernels-cpu-torch-cut-short-unproven.json")
    assert json.loads(short.read_text(encoding="utf-8"))["figures"]["rows"]


def test_kernels_of_a_cpu_are_proven_there_without_triton() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q"]
    proofs = [
        line
        for tests in PROOFS["cpu"]
        for line in subprocess.run(
            [*command, *tests], cwd=ROOT, capture_output=True, text=True, timeout=200
        ).stdout.splitlines()
        if "::" in line
    ]
    assert not [name for name in proofs if "triton" in name or "test_compilation" in name]
    for name in ("attention", "elementwise", "cache_ops"):
        of_both = [proof for proof in proofs if f"test_{name}.py" in proof]
        assert all(any(backend in proof for proof in of_both) for backend in ("cpu", "torch")), name


def test_no_figure_comes_of_a_red_test(tmp_path: Path) -> None:
    red, green = tmp_path / "test_red.py", tmp_path / "test_green.py"
    red.write_text("def test_it() -> None:\n    assert False\n")
    green.write_text("def test_it() -> None:\n    pass\n")
    assert prove([str(green)]).startswith("1 tests passed")
    for tests in (red, tmp_path / "test_missing.py"):  # Where nothing ran nothing is proven.
        with pytest.raises(RedTests, match="no benchmark on a red test"):
            prove([str(tests)])
    proof = proof_of([[str(green)], [str(red)]], device="cpu", is_skipped=False)
    assert proof.proven.startswith("1 tests passed")
    assert proof.unproven.startswith("1 failed")
    late = proof_of([[str(green)]], device="cpu", is_skipped=False, seconds=0.01)
    assert (late.proven, late.unproven) == ("nothing", f"not all tests ended within 0 s ({green})")


def test_errors_of_coarser_caches_are_differences_from_the_exact_model() -> None:
    """The exact model is transformers'."""
    from transformers import AutoModelForCausalLM

    rows, has_int8 = held_out_rows()[:2, :96], load_extension().has_int8
    measured = measure(rows)
    assert tuple(measured) == (CASES if has_int8 else CASES[:6])
    exact = measured[EXACT]
    assert (exact.mean_logit_error, exact.max_logit_error, exact.same_first_choice) == (0.0, 0.0, 1.0)
    int8, fp8 = (measured[Case(dtype="float32", kv_cache_dtype=kv)] for kv in ("int8", "fp8"))
    assert 0 < int8.mean_logit_error < fp8.mean_logit_error < 0.5
    assert int8.max_logit_error > int8.mean_logit_error
    assert all(0.9 < accuracy.perplexity / exact.perplexity < 1.1 for accuracy in measured.values())
    floors = floors_of(measured)
    assert len(floors) == len(measured) - 1 + 2
    assert floors[-1].value == pytest.approx(128 / 68)

    few = rows[:1, :64]
    logits = next(logits_of(EXACT, few))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(model_path("demo"), dtype=torch.float32)
        torch.testing.assert_close(logits, model(few).logits[0].float(), atol=2e-3, rtol=2e-3)
    for dtype in ("float32", "bfloat16") if has_int8 else ():
        case = Case(dtype=dtype, kv_cache_dtype="auto", linears="int8")
        errors = [
            float((next(logits_of(replace(case, linears=linears), few)) - logits).abs().mean())
            for linears in ("full", "int8")
        ]
        assert errors[0] + 0.01 < errors[1] < 0.2
