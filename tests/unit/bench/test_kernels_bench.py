"""The kernels' bench counts bytes and FLOPs rightly, runs every kernel at a small shape, and keeps a report of a run.

A run that is cut short keeps what it has, says so and fails. Triton's interpreter is refused.
"""

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blockyard.kernels.interface import Backend
from blockyard.kernels.selection import choose_backend
from blockyard.kernels.torch.backend import TorchBackend

import bench.kernels.__main__ as main
from bench.kernels import expert_cases
from bench.kernels.__main__ import PROOFS, make_bench, measure, row_of
from bench.kernels.attention_cases import CASCADE, ONE_BY_ONE, each_by_itself
from bench.kernels.case import Bench, Case
from bench.kernels.cases import Sizes, cases
from bench.kernels.expert_cases import ExpertShape
from bench.kernels.linear_cases import FORMS, linears, weight_bytes
from bench.kernels.report import CASCADE_SHAPE, OTHERS_OVER_IT, PREFILL_SHAPE, floors_of, text_of
from bench.kernels.timing import Clock, Machine
from bench.proof import Proof
from tests.unit.kernels.rig import small_plan

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
BENCH = Bench(backend=TorchBackend(), device=CPU, dtype=torch.float32)
SMALL = Sizes(
    sequences=(1, 3),
    contexts=(40,),
    prefills=(33,),
    models=("llama-166m", "qwen3-0.6b"),
    shared=((8, 512, 32),),
    chunks=((5, 40),),
    mixed=(2, 5, 40),
    window=(2, 40, 17),
    swaps=(2,),
    mixtures=(ExpertShape(model="tiny", hidden=32, inner=16, experts=4, top_k=2),),
)
MACHINE = Machine(copy_bytes_per_second=1e9, matmul_flops_per_second=1e12)
KERNEL_TESTS = {
    "attention": "mixed attention,prefill attention,decode attention,decode attention, no cascade,"
    "decode attention, window,decode attention, KV,prefill attention, KV",
    "cpu_cascade": "decode attention, cascade",
    "elementwise": "rms_norm,add_rms_norm,silu_mul,rotary",
    "cache_ops": "write_kv,write_kv, KV,copy_blocks,qk_norm_rope_write,qk_norm_rope_write, KV,"
    "qk_norm_rope_write with QK norms,qk_norm_rope_write with QK norms, KV",
    "cpu_linears": "linear",
    "experts": "experts",
    "cpu_backend": "embed,greedy tokens",
    "nucleus": "draw, usual top-p,draw, wide top-p",
}
"""Kernels that each file of tests/unit/kernels proves, as the cpu or the torch backend implements them."""
ELSEWHERE = {
    "draw, no filter": "tests/unit/device/test_sampler.py",
    "blocks to host memory": "tests/unit/device/test_host_blocks.py",
    "blocks from host memory": "tests/unit/device/test_host_blocks.py",
}


def case(kernel: str, shape: str) -> Case:
    return next(c for c in cases(BENCH, SMALL) if (c.kernel, c.shape) == (kernel, shape))


SHARED = "decode 8 x (512 shared + 32)"
OF_CHUNK = sum(range(36, 41))
BYTES_SHARED = 2 * (512 + 8 * 32) * 4 * 64 * 4 + 2 * 8 * 16 * 64 * 4
COUNTS: dict[tuple[str, str], tuple[int | None, int | None]] = {
    ("decode attention", "decode 3 x 40"): (
        2 * 3 * 40 * 4 * 64 * 4 + 2 * 3 * 16 * 64 * 4,
        4 * 3 * 40 * 16 * 64,
    ),
    (CASCADE, SHARED): (BYTES_SHARED, 4 * 8 * 544 * 16 * 64),
    (ONE_BY_ONE, SHARED): (BYTES_SHARED, 4 * 8 * 544 * 16 * 64),
    ("decode attention, window", "decode 2 x 40, 17 seen"): (
        2 * 2 * 17 * 4 * 64 * 4 + 2 * 2 * 16 * 64 * 4,
        4 * 2 * 17 * 16 * 64,
    ),
    ("prefill attention", "prefill 33"): (None, 4 * (33 * 34 // 2) * 16 * 64),
    ("prefill attention", "last 5 of 40"): (None, 4 * OF_CHUNK * 16 * 64),
    ("mixed attention", "decode 2 and last 5, of 40"): (
        2 * 3 * 40 * 4 * 64 * 4 + 2 * 7 * 16 * 64 * 4,
        4 * (OF_CHUNK + 2 * 40) * 16 * 64,
    ),
    ("linear gate-up", "3 tokens"): (4 * (1024 * 5504 + 3 * (1024 + 5504)), 2 * 3 * 1024 * 5504),
    ("experts", "1 tokens"): (4 * (2 * 3 * 32 * 16 + 2 * 32), None),
    ("experts", "33 tokens"): (4 * (4 * 3 * 32 * 16 + 33 * 2 * 32), 2 * 33 * 2 * 3 * 32 * 16),
    ("greedy tokens", "3 tokens"): (3 * 32000 * 4, None),
    ("embed", "3 tokens"): (2 * 3 * 1024 * 4, None),
    ("write_kv, KV in int8", "3 tokens"): (2 * 3 * 4 * (64 * 4 + 64 + 4), None),
    ("qk_norm_rope_write, KV in fp8", "3 tokens"): (2 * (16 + 4) * 3 * 64 * 4 + 2 * 3 * 4 * (64 + 4), None),
    ("qk_norm_rope_write", "3 tokens"): ((2 * 16 + 4 * 4) * 3 * 64 * 4, None),
    ("blocks to host memory", "2 blocks"): (2 * 2 * 12 * 2 * 4 * 16 * 64 * 4, None),
}
"""Bytes that must move and FLOPs, by kernel and shape: each key once for all that share it, no key that nobody sees."""


@pytest.mark.parametrize(("kernel", "shape"), COUNTS)
def test_bytes_and_flops_are_those_that_must_be(kernel: str, shape: str) -> None:
    num_bytes, flops = COUNTS[kernel, shape]
    counted = case(kernel, shape)
    assert num_bytes is None or counted.num_bytes == num_bytes
    assert flops is None or counted.flops == flops


def test_a_weight_in_4_bits_has_scales_and_zero_points_beside_its_numbers() -> None:
    numbers, groups = 4096 * 1024, 4096 * 1024 // 128
    assert weight_bytes("4 bits", 4096, 1024) == numbers // 2 + 2 * groups + groups // 2
    assert weight_bytes("fp8", 4096, 1024) == numbers + 2 * 4096


def test_a_plan_of_decodes_each_by_itself_shares_nothing_and_sees_everything() -> None:
    plan = small_plan([1] * 9, [650] * 9, [[*range(40), 40 + row] for row in range(9)])
    assert len(plan.shared_items_Y5)
    on_cpu, on_gpu = (each_by_itself(plan, torch.device(kind)) for kind in ("cpu", "cuda"))
    assert (len(on_gpu.shared_items_Y5), on_gpu.window) == (0, None)
    assert (len(on_cpu.shared_items_Y5), on_cpu.window, on_cpu.first_visible_key(0)) == (0, 650, 0)


@pytest.mark.parametrize("kernel", sorted({c.kernel for c in cases(BENCH, SMALL)}))
def test_every_kernel_runs_at_its_shapes_and_a_test_proves_it(kernel: str) -> None:
    model = "qwen3-0.6b" if "QK norms" in kernel else "llama-166m"
    with torch.inference_mode():
        for one in cases(BENCH, SMALL):
            if one.kernel == kernel and one.model in (model, "tiny"):
                one.make()()
    # Without how many bits, which linear, or how many blocks.
    name = kernel.partition(" in ")[0].partition(" (")[0]
    name = "linear" if name.startswith("linear") else name
    proofs = [file for file, kernels in KERNEL_TESTS.items() if f",{name}," in f",{kernels},"]
    paths = [f"tests/unit/kernels/test_{file}.py" for file in proofs] or [ELSEWHERE[name]]
    proven = [path for tests in PROOFS["cpu"] for path in tests if path.startswith("tests/")]
    assert all((ROOT / path).exists() for path in paths)
    assert all(any(path.startswith(prefix) for prefix in proven) for path in paths)


@pytest.mark.parametrize("name", ["triton", "torch", "cpu"])
def test_every_form_of_a_weight_is_measured_in_turns(name: str) -> None:
    backend: Backend = choose_backend(CPU, requested=name)
    setting = Bench(backend=backend, device=CPU, dtype=torch.float32)
    shape = ExpertShape(model="tiny", hidden=128, inner=128, experts=3, top_k=2)
    forms = expert_cases.FORMS.get(name, ())
    of_experts = list(expert_cases.experts(setting, shape, 8))
    assert [one.kernel for one in of_experts] == ["experts", *(f"experts, {form}" for form in forms)]
    assert {one.turns for one in of_experts} == {"tiny experts 8" if forms else ""}
    quantised = name == "triton"
    of_linears = list(linears(setting, "model", 1, "linear out", 40, 256, with_quantised=quantised))
    assert len(of_linears) == 1 + quantised * len(FORMS)
    for one in (*of_experts, *of_linears):
        result = one.make()()
        assert isinstance(result, torch.Tensor)
        assert bool(result.isfinite().all())


def test_a_row_is_a_share_of_the_slower_of_two_limits() -> None:
    counted = replace(case("embed", "3 tokens"), num_bytes=10**6, flops=10**6)
    row = row_of(counted, 0.002, MACHINE)
    assert (row["of_copy"], row["of_matmul"], row["of_roofline"]) == (0.5, 0.0005, 0.5)


def test_cases_that_do_not_fit_the_memory_are_skipped_and_counted() -> None:
    measured = measure(BENCH, lambda: MACHINE, memory_bytes=0, only="")
    assert not measured.rows
    assert measured.skipped > 50


def test_what_decodes_gain_together_is_measured_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates are the faster ones of before and after."""
    monkeypatch.setattr(main, "CPU", replace(SMALL, models=("llama-166m",)))
    rates = iter([Machine(copy_bytes_per_second=b, matmul_flops_per_second=f) for b, f in ((1, 3), (2, 1))])
    measured = measure(BENCH, lambda: next(rates), memory_bytes=1 << 30, only="cascade")
    assert measured.machine == Machine(copy_bytes_per_second=2, matmul_flops_per_second=3)
    with_cascade, without = measured.rows
    assert (with_cascade["kernel"], without["kernel"]) == (CASCADE, ONE_BY_ONE)
    (gain,), (loss,) = with_cascade["others_over_it"].values(), without["others_over_it"].values()
    assert gain * loss == pytest.approx(1, rel=1e-2)


def test_calls_take_turns_and_each_is_first_as_often_as_the_other() -> None:
    calls: list[str] = []
    first, second = Clock(CPU).turns([lambda: calls.append("a"), lambda: calls.append("b")])
    assert len(first) == len(second) >= 5
    assert calls[4:8] == ["a", "b", "b", "a"]


def row(kernel: str, shape: str, us: float = 10.0, of_copy: float = 0.1, **more: Any) -> dict[str, Any]:
    known = {"model": "llama-3.1-8b", "kernel": kernel, "shape": shape, "bytes": 2**30, "flops": 1, "us": us}
    return known | {"of_copy": of_copy, "of_matmul": 0.1, "of_roofline": 0.1} | more


def floors(*rows: dict[str, Any]) -> list[tuple[str, float, float]]:
    assert not floors_of(list(rows), "cpu")
    return [(floor.name, floor.value, floor.floor) for floor in floors_of(list(rows), "cuda")]


def test_floors_are_a_gpus_and_judge_its_worst_row_of_pools_in_the_data_type() -> None:
    together = row(CASCADE, CASCADE_SHAPE, 10, 0.5, others_over_it={ONE_BY_ONE: 4.9})
    alone = row(ONE_BY_ONE, CASCADE_SHAPE, 50, 0.1, others_over_it={CASCADE: 0.2})
    assert [judged[1:] for judged in floors(together, alone)] == [(4.9, 5.0)]
    lone = row("decode attention", "decode 1 x 32768", 10, 0.9)
    in_8_bits = lone | {"kernel": "decode attention, KV in int8", "of_copy": 0.1}
    prompt = row("prefill attention, KV in fp8", PREFILL_SHAPE, 1)
    assert floors(lone, in_8_bits, prompt)[0][:2] == ("decode attention, one sequence of 32k, of copy", 0.9)
    assert len(floors(lone, in_8_bits, prompt)) == 1
    few, many = (
        row("decode attention", f"decode {n} x 8192", us, of) for n, us, of in ((8, 10, 0.9), (16, 40, 0.8))
    )
    assert [value for _, value, _ in floors(few, many)] == [0.8, 2.0]


def test_quantised_linears_are_compared_with_full_precision_of_the_same_turns() -> None:
    def linear(kernel: str, tokens: int, of_roofline: float, **others: float) -> dict[str, Any]:
        over = {name.replace("_", " "): ratio for name, ratio in others.items()}
        return row(kernel, f"{tokens} tokens", of_roofline=of_roofline, **{OTHERS_OVER_IT: over})

    rows = [
        linear("linear out", 1, 0.9),
        linear("linear out, 4 bits", 1, 0.83, linear_out=2.5),
        linear("linear down, 4 bits", 1, 0.85, linear_down=2.2),
        linear("linear out, 4 bits", 64, 0.5, linear_out=1.1),
        linear("linear out, int8", 1, 0.7, linear_out=1.3),
    ]
    found = {name: (value, floor) for name, value, floor in floors(*rows)}
    assert found["linears with a weight in 4 bits, one token, least % of roofline"] == (0.83, 0.8)
    assert found["the same, time of full precision over theirs"] == (2.2, 2.0)
    figures = {"rows": rows, "machine": {"copy_gb_per_second": 1.0, "matmul_tflops_per_second": 1.0}}
    known = {"backend": "triton", "dtype": "bfloat16", "device_name": "GPU", "skipped": 0, "proven": ""}
    text = text_of(figures | known | {"cut_short": False})
    assert "| linear out, 4 bits | 1 tokens | 10.0 | 83% | 2.50 |" in text
    assert "Cut short" not in text
    assert "**Cut short: later cases" in text_of(figures | known | {"cut_short": True})


def interrupt() -> Callable[[], object]:
    raise KeyboardInterrupt


def test_a_run_keeps_a_report_and_one_cut_short_leaves_it_as_it_is_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A case is kept also where the signal comes as its line is printed."""
    whole = [one for one in cases(BENCH, SMALL) if one.kernel in ("rms_norm", "silu_mul")][:3]
    options = ["--device", "cpu", "--backend", "torch", "--threads", str(torch.get_num_threads())]
    monkeypatch.setattr(sys, "argv", ["bench.kernels", *options, "--output", str(tmp_path)])
    monkeypatch.setattr(main, "measure_machine", lambda *_: MACHINE)
    monkeypatch.setattr(main, "proof_of", lambda *_, **__: Proof(proven="all"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(main, "cases", lambda *_: iter(whole))
    main.main()
    assert f"## {whole[0].kernel}, llama-166m" in capsys.readouterr().out
    (complete,) = tmp_path.glob("*.json")
    kept = complete.read_text(encoding="utf-8")
    assert len(json.loads(kept)["figures"]["rows"]) == 3

    monkeypatch.setattr(main, "cases", lambda *_: iter([*whole[:2], replace(whole[2], make=interrupt)]))
    with pytest.raises(SystemExit, match="cut short"):
        main.main()
    (short,) = tmp_path.glob("*-kernels-cpu-torch-cut-short.json")
    figures = json.loads(short.read_text(encoding="utf-8"))["figures"]
    assert (figures["cut_short"], len(figures["rows"])) == (True, 2)
    assert complete.read_text(encoding="utf-8") == kept

    told: list[str] = []

    def ended_at_the_second(line: str, **_: object) -> None:
        told.append(line)
        if len(told) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(main, "cases", lambda *_: iter(whole))
    monkeypatch.setattr(main, "print", ended_at_the_second, raising=False)
    measured = measure(BENCH, lambda: MACHINE, memory_bytes=1 << 30, only="")
    assert (len(measured.rows), measured.is_cut_short) == (2, True)
    monkeypatch.setattr(main, "cases", lambda *_: iter([replace(whole[2], make=interrupt)]))
    with pytest.raises(KeyboardInterrupt):
        measure(BENCH, lambda: MACHINE, memory_bytes=1 << 30, only="")


def test_tritons_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit, match="times of Triton's interpreter mean nothing"):
        make_bench("cpu", None, "triton")
