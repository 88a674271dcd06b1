"""The kernels' bench counts bytes and FLOPs rightly, runs every kernel at a small shape, and writes a report.

It refuses Triton's interpreter.
"""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from blockyard.deploy.figures.plot_style import save
from blockyard.kernels.attention.plan import plan_attention
from blockyard.kernels.torch.backend import TorchBackend

import bench.kernels.__main__ as main
from bench.kernels.__main__ import PROOFS, make_bench, measure, row_of
from bench.kernels.attention_cases import CASCADE, ONE_BY_ONE, each_by_itself
from bench.kernels.case import Bench, Case
from bench.kernels.cases import FULL, Sizes, cases
from bench.kernels.expert_cases import ExpertShape
from bench.kernels.linear_cases import weight_bytes
from bench.kernels.report import CASCADE_SHAPE, OTHERS_OVER_IT, PREFILL_SHAPE, floors_of, text_of
from bench.kernels.timing import Clock, Machine, fill_cache
from bench.plots import figure_of

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
BENCH = Bench(backend=TorchBackend(), device=CPU, dtype=torch.float32)
SMALL = Sizes(
    sequences=(1, 3),
    contexts=(40,),
    prefills=(33,),
    models=("llama-166m",),
    shared=((8, 512, 32),),
    chunks=((5, 40),),
    mixed=(2, 5, 40),
    window=(2, 40, 17),
    swaps=(2,),
    mixtures=(ExpertShape(model="tiny", hidden=32, inner=16, experts=4, top_k=2),),
)
MACHINE = Machine(copy_bytes_per_second=1e9, matmul_flops_per_second=1e12)


TESTS = {
    "decode attention": "tests/unit/kernels/test_attention.py",
    "decode attention, KV": "tests/unit/kernels/test_quantised_pool.py",
    "decode attention, cascade": "tests/unit/kernels/test_cpu_cascade.py",
    "decode attention, no cascade": "tests/unit/kernels/test_attention.py",
    "decode attention, window": "tests/unit/kernels/test_window.py",
    "prefill attention": "tests/unit/kernels/test_attention.py",
    "prefill attention, KV": "tests/unit/kernels/test_quantised_pool.py",
    "mixed attention": "tests/unit/kernels/test_attention.py",
    "rms_norm": "tests/unit/kernels/test_elementwise.py",
    "add_rms_norm": "tests/unit/kernels/test_elementwise.py",
    "silu_mul": "tests/unit/kernels/test_elementwise.py",
    "rotary": "tests/unit/kernels/test_elementwise.py",
    "write_kv": "tests/unit/kernels/test_cache_ops.py",
    "write_kv, KV": "tests/unit/kernels/test_quantised_pool.py",
    "qk_norm_rope_write": "tests/unit/kernels/test_cache_ops.py",
    "qk_norm_rope_write, KV": "tests/unit/kernels/test_quantised_pool.py",
    "qk_norm_rope_write with QK norms": "tests/unit/kernels/test_cache_ops.py",
    "qk_norm_rope_write with QK norms, KV": "tests/unit/kernels/test_quantised_pool.py",
    "linear": "tests/unit/kernels/test_panel_linear.py",
    "experts": "tests/unit/kernels/test_experts.py",
    "embed": "tests/unit/kernels/test_cpu_backend.py",
    "copy_blocks": "tests/unit/kernels/test_cache_ops.py",
    "greedy tokens": "tests/unit/kernels/test_cpu_backend.py",
    "draw, no filter": "tests/unit/device/test_sampler.py",
    "draw, usual top-p": "tests/unit/kernels/test_nucleus.py",
    "draw, wide top-p": "tests/unit/kernels/test_nucleus.py",
    "blocks to host memory": "tests/unit/device/test_host_blocks.py",
    "blocks from host memory": "tests/unit/device/test_host_blocks.py",
}
"""Test of each kernel as the cpu or the torch backend implements it."""


def case(kernel: str, shape: str, sizes: Sizes = SMALL) -> Case:
    return next(c for c in cases(BENCH, sizes) if (c.kernel, c.shape) == (kernel, shape))


def kind_of(kernel: str) -> str:
    """Without how many bits, which linear, or how many blocks."""
    name = kernel.partition(" in ")[0].partition(" (")[0]
    return "linear" if name.startswith("linear") else name


def test_a_decode_reads_all_keys_and_values_once() -> None:
    decode = case("decode attention", "decode 3 x 40")
    keys_and_values = 2 * 3 * 40 * 4 * 64 * 4
    queries_and_outputs = 2 * 3 * 16 * 64 * 4
    assert decode.num_bytes == keys_and_values + queries_and_outputs
    assert decode.flops == 4 * 3 * 40 * 16 * 64


@pytest.mark.parametrize("kernel", [CASCADE, ONE_BY_ONE])
def test_what_decodes_share_must_move_once_and_is_computed_for_each(kernel: str) -> None:
    decode = case(kernel, "decode 8 x (512 shared + 32)")
    assert decode.num_bytes == 2 * (512 + 8 * 32) * 4 * 64 * 4 + 2 * 8 * 16 * 64 * 4
    assert decode.flops == 4 * 8 * 544 * 16 * 64


def test_a_plan_of_decodes_each_by_itself_shares_nothing_and_sees_everything() -> None:
    tables = [[*range(40), 40 + row] for row in range(9)]
    plan = plan_attention(
        query_lens=[1] * 9,
        context_lens=[650] * 9,
        block_tables=tables,
        block_size=16,
        device="cpu",
        num_kv_heads=1,
    )
    assert len(plan.shared_items_Y5)
    on_cpu, on_gpu = (each_by_itself(plan, torch.device(kind)) for kind in ("cpu", "cuda"))
    assert (len(on_gpu.shared_items_Y5), on_gpu.window) == (0, None)
    assert (len(on_cpu.shared_items_Y5), on_cpu.window, on_cpu.first_visible_key(0)) == (0, 650, 0)


def test_a_causal_prefill_computes_half_of_its_square() -> None:
    assert case("prefill attention", "prefill 33").flops == 4 * (33 * 34 // 2) * 16 * 64


def test_a_linear_moves_its_weight_and_multiplies_it_with_each_token() -> None:
    gate_up = case("linear gate-up", "3 tokens")
    assert gate_up.flops == 2 * 3 * 1024 * 5504
    assert gate_up.num_bytes == 4 * (1024 * 5504 + 3 * (1024 + 5504))


def test_a_weight_in_4_bits_has_scales_and_zero_points_beside_its_numbers() -> None:
    numbers, groups = 4096 * 1024, 4096 * 1024 // 128
    assert weight_bytes("4 bits", 4096, 1024) == numbers // 2 + 2 * groups + groups // 2
    assert weight_bytes("fp8", 4096, 1024) == numbers + 2 * 4096


def test_quantised_linears_are_compared_with_full_precision_of_the_same_turns() -> None:
    def row(kernel: str, tokens: int, of_roofline: float, others: dict[str, float]) -> dict[str, object]:
        fields = {"bytes": 1, "flops": 1, "us": 10.0, "of_copy": 0.1, "of_matmul": 0.1}
        known = {"model": "llama-3.1-8b", "kernel": kernel, "shape": f"{tokens} tokens"}
        return fields | known | {"of_roofline": of_roofline, OTHERS_OVER_IT: others}

    rows = [
        row("linear out", 1, 0.9, {"linear out, 4 bits": 0.4}),
        row("linear out, 4 bits", 1, 0.83, {"linear out": 2.5, "linear out, int8": 1.9}),
        row("linear down, 4 bits", 1, 0.85, {"linear down": 2.2}),
        row("linear out, 4 bits", 64, 0.5, {"linear out": 1.1}),
        row("linear out, int8", 1, 0.7, {"linear out": 1.3}),
    ]
    floors = {floor.name: (floor.value, floor.floor) for floor in floors_of(rows, "cuda")}
    assert floors["linears with a weight in 4 bits, one token, least % of roofline"] == (0.83, 0.8)
    assert floors["the same, time of full precision over theirs"] == (2.2, 2.0)
    figures = {"rows": rows, "machine": {"copy_gb_per_second": 1.0, "matmul_tflops_per_second": 1.0}}
    text = text_of(
        figures
        | {"backend": "triton", "dtype": "bfloat16", "device_name": "GPU", "skipped": 0}
        | {"proven": "", "cut_short": False}
    )
    assert "| linear out, 4 bits | 1 tokens | 10.0 | 83% | 2.50 |" in text


def test_experts_that_no_token_chooses_need_not_be_read() -> None:
    one, many = case("experts", "1 tokens"), case("experts", "33 tokens")
    assert one.num_bytes == 4 * (2 * 3 * 32 * 16 + 2 * 32)
    assert many.num_bytes == 4 * (4 * 3 * 32 * 16 + 33 * 2 * 32)
    assert many.flops == 2 * 33 * 2 * 3 * 32 * 16


def test_a_head_is_multiplied_and_searched_for_no_more_rows_than_sample() -> None:
    sizes = replace(SMALL, sequences=(256,), prefills=(257,))
    for kernel in ("linear head", "greedy tokens"):
        assert [c.shape for c in cases(BENCH, sizes) if c.kernel == kernel] == ["256 tokens"]
    assert case("greedy tokens", "3 tokens").num_bytes == 3 * 32000 * 4
    assert case("embed", "3 tokens").num_bytes == 2 * 3 * 1024 * 4


def test_what_no_query_sees_need_not_be_read() -> None:
    windowed = case("decode attention, window", "decode 2 x 40, 17 seen")
    assert windowed.num_bytes == 2 * 2 * 17 * 4 * 64 * 4 + 2 * 2 * 16 * 64 * 4
    assert windowed.flops == 4 * 2 * 17 * 16 * 64


def test_a_chunk_sees_what_came_before_it_and_a_decode_beside_it_all_of_its_own() -> None:
    of_chunk = sum(range(36, 41))
    assert case("prefill attention", "last 5 of 40").flops == 4 * of_chunk * 16 * 64
    mixed = case("mixed attention", "decode 2 and last 5, of 40")
    assert mixed.flops == 4 * (of_chunk + 2 * 40) * 16 * 64
    assert mixed.num_bytes == 2 * 3 * 40 * 4 * 64 * 4 + 2 * 7 * 16 * 64 * 4


def test_heads_are_read_in_full_and_written_in_8_bits_with_a_scale_each() -> None:
    for stored in ("int8", "fp8"):
        assert case(f"write_kv, KV in {stored}", "3 tokens").num_bytes == 2 * 3 * 4 * (64 * 4 + 64 + 4)
        placed = case(f"qk_norm_rope_write, KV in {stored}", "3 tokens")
        assert placed.num_bytes == 2 * (16 + 4) * 3 * 64 * 4 + 2 * 3 * 4 * (64 + 4)
    assert case("qk_norm_rope_write", "3 tokens").num_bytes == (2 * 16 + 4 * 4) * 3 * 64 * 4


def test_only_models_with_norms_of_heads_are_given_them() -> None:
    small = replace(SMALL, models=("llama-166m", "qwen3-0.6b"))
    placed = {c.model: c for c in cases(BENCH, small) if c.kernel.startswith("qk_norm_rope_write")}
    assert "with QK norms" not in placed["llama-166m"].kernel
    assert "with QK norms" in placed["qwen3-0.6b"].kernel
    with torch.inference_mode():
        placed["qwen3-0.6b"].make()()


def test_blocks_go_to_host_memory_with_all_their_layers() -> None:
    for kernel in ("blocks to host memory", "blocks from host memory"):
        assert case(kernel, "2 blocks").num_bytes == 2 * 2 * 12 * 2 * 4 * 16 * 64 * 4


@pytest.mark.parametrize("kernel", sorted({c.kernel for c in cases(BENCH, SMALL)}))
def test_every_kernel_runs_at_its_shapes(kernel: str) -> None:
    with torch.inference_mode():
        for one in cases(BENCH, SMALL):
            if one.kernel == kernel:
                one.make()()


@pytest.mark.slow
def test_every_kernel_measured_on_a_cpu_is_proven_there_without_triton() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only"]
    proofs = [
        line
        for tests in PROOFS["cpu"]
        for line in subprocess.run(
            [*command, *tests], cwd=ROOT, capture_output=True, text=True, timeout=200
        ).stdout.splitlines()
        if "::" in line
    ]
    assert not [name for name in proofs if "triton" in name or "test_compilation" in name]
    proven = {name.partition("::")[0] for name in proofs}
    both = replace(main.CPU, sequences=(1, 8), contexts=(128,))
    for one in cases(BENCH, both):
        assert TESTS[kind_of(one.kernel)] in proven
    for name in ("attention", "elementwise", "cache_ops", "quantised_pool", "window"):
        of_both = [proof for proof in proofs if f"test_{name}.py" in proof]
        assert all(any(backend in proof for proof in of_both) for backend in ("cpu", "torch")), name


def test_the_full_shapes_are_the_issues() -> None:
    assert set(FULL.models) == {"llama-3.1-8b", "qwen3-0.6b", "qwen3-8b", "qwen3-14b"}
    assert (min(FULL.sequences), max(FULL.sequences)) == (1, 256)
    assert (min(FULL.contexts), max(FULL.contexts)) == (128, 32768)
    assert (min(FULL.prefills), max(FULL.prefills)) == (128, 32768)
    assert (64, 8192, 256) in FULL.shared


def test_a_row_is_a_share_of_the_slower_of_two_limits() -> None:
    row = row_of(
        Case(
            kernel="k",
            model="m",
            shape="s",
            num_bytes=10**6,
            flops=10**6,
            resident_bytes=1,
            make=lambda: print,
        ),
        0.002,
        MACHINE,
    )
    assert (row["of_copy"], row["of_matmul"], row["of_roofline"]) == (0.5, 0.0005, 0.5)


def test_cases_that_do_not_fit_the_memory_are_skipped_and_counted() -> None:
    measured = measure(BENCH, lambda: MACHINE, memory_bytes=0, only="")
    assert not measured.rows
    assert measured.skipped > 50


def test_what_decodes_gain_together_is_measured_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "CPU", SMALL)
    measured = measure(BENCH, lambda: MACHINE, memory_bytes=1 << 30, only="cascade")
    with_cascade, without = measured.rows
    assert (with_cascade["kernel"], without["kernel"]) == (CASCADE, ONE_BY_ONE)
    (gain,), (loss,) = with_cascade["others_over_it"].values(), without["others_over_it"].values()
    assert gain * loss == pytest.approx(1, rel=1e-2)


@pytest.mark.slow
def test_shares_are_of_the_faster_rates_of_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "CPU", SMALL)
    before, after = (
        Machine(copy_bytes_per_second=b, matmul_flops_per_second=f) for b, f in ((1e9, 3e12), (2e9, 1e12))
    )
    rates = iter((before, after))
    measured = measure(BENCH, lambda: next(rates), memory_bytes=1 << 30, only="rms_norm")
    assert measured.machine == Machine(copy_bytes_per_second=2e9, matmul_flops_per_second=3e12)
    row = measured.rows[0]
    assert row["of_copy"] == pytest.approx(row["bytes"] / 2e9 / (row["us"] / 1e6), rel=1e-2)


def test_calls_take_turns_and_each_is_first_as_often_as_the_other() -> None:
    calls: list[str] = []
    first, second = Clock(CPU).turns([lambda: calls.append("a"), lambda: calls.append("b")])
    assert len(first) == len(second) >= 5
    assert calls[4:8] == ["a", "b", "b", "a"]


def test_a_clock_gives_the_median_of_calls() -> None:
    calls, begun = [], time.perf_counter()
    seconds = Clock(CPU).seconds(lambda: calls.append(1))
    assert 0 <= seconds < time.perf_counter() - begun
    assert len(calls) >= 6


def decode_row(shape: str, us: float, of_copy: float) -> dict[str, object]:
    return {
        "model": "llama-3.1-8b",
        "kernel": "decode attention",
        "shape": shape,
        "bytes": 2**30,
        "flops": 1,
        "us": us,
        "of_copy": of_copy,
    }


def test_a_cascade_is_judged_by_the_time_of_the_same_decodes_each_by_itself() -> None:
    rows = [
        decode_row(CASCADE_SHAPE, 10, 0.5) | {"kernel": CASCADE, "others_over_it": {ONE_BY_ONE: 4.9}},
        decode_row(CASCADE_SHAPE, 50, 0.1) | {"kernel": ONE_BY_ONE, "others_over_it": {CASCADE: 0.2}},
    ]
    (floor,) = floors_of(rows, "cuda")
    assert (floor.value, floor.floor, floor.holds) == (4.9, 5.0, False)


def test_goals_are_of_pools_in_the_data_type() -> None:
    rows = [decode_row("decode 1 x 32768", 10, 0.9)]
    rows += [decode_row("decode 1 x 32768", 10, 0.1) | {"kernel": "decode attention, KV in int8"}]
    rows += [decode_row(PREFILL_SHAPE, 1, 0.1) | {"kernel": "prefill attention, KV in fp8"}]
    (floor,) = floors_of(rows, "cuda")
    assert (floor.name, floor.value) == ("decode attention, one sequence of 32k, of copy", 0.9)


def test_goals_are_a_gpus_and_judge_its_worst_row() -> None:
    rows = [decode_row("decode 8 x 8192", 10, 0.9), decode_row("decode 16 x 8192", 40, 0.8)]
    floors = {floor.name.partition(",")[0]: floor for floor in floors_of(rows, "cuda")}
    assert (floors["decode attention"].value, floors["decode attention"].holds) == (0.8, False)
    assert (floors["decode"].value, floors["decode"].holds) == (2.0, False)
    assert not floors_of(rows, "cpu")


def test_a_picture_shows_kernels_that_compute_and_such_as_only_copy(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measured = [row_of(case, 0.001, MACHINE) for case in cases(BENCH, SMALL)]
    assert {bool(row["flops"]) for row in measured} == {True, False}
    rates = {"copy_gb_per_second": 1.0, "matmul_tflops_per_second": 1.0}
    figures = {"backend": "torch", "dtype": "float32", "device_name": "a device", "machine": rates}
    save(figure_of({**figures, "rows": measured}), tmp_path / "kernels.png")
    assert (tmp_path / "kernels.png").stat().st_size > 10_000


def test_a_cache_is_filled_without_writing() -> None:
    values = torch.zeros(100)
    fill_cache(values)
    assert values._version == 0


def test_tritons_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit, match="times of Triton's interpreter mean nothing"):
        make_bench("cpu", None, "triton")
