"""The accuracy bench measures what it says: the exact model has no error, coarser caches have some."""

from dataclasses import replace

import pytest
import torch
from blockyard.kernels.cpu.extension import load_extension

from bench.kv_accuracy import (
    CASES,
    EXACT,
    Accuracy,
    Case,
    capacity_of,
    floors_of,
    held_out_rows,
    logits_of,
    measure,
    text_of,
)


@pytest.mark.slow
def test_errors_are_differences_from_the_exact_model() -> None:
    rows = held_out_rows()[:2, :96]
    measured = measure(rows)
    assert tuple(measured) == (CASES if load_extension().has_int8 else CASES[:6])
    exact = measured[EXACT]
    assert (exact.mean_logit_error, exact.max_logit_error, exact.same_first_choice) == (0.0, 0.0, 1.0)
    int8, fp8 = (measured[Case(dtype="float32", kv_cache_dtype=kv)] for kv in ("int8", "fp8"))
    assert 0 < int8.mean_logit_error < fp8.mean_logit_error < 0.5
    assert int8.max_logit_error > int8.mean_logit_error
    assert all(0.9 < accuracy.perplexity / exact.perplexity < 1.1 for accuracy in measured.values())
    floors = floors_of(measured)
    assert len(floors) == len(measured) - 1 + 2
    assert floors[-1].value == pytest.approx(128 / 68)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linears_in_int8_are_a_little_off(dtype: str) -> None:
    if not load_extension().has_int8:
        pytest.skip("the CPU has no instructions for them")
    rows = held_out_rows()[:1, :64]
    case = Case(dtype=dtype, kv_cache_dtype="auto", linears="int8")
    assert case in CASES
    logits, full, exact = (
        next(logits_of(which, rows)) for which in (case, replace(case, linears="full"), EXACT)
    )
    errors = [float((other - exact).abs().mean()) for other in (full, logits)]
    assert errors[0] + 0.01 < errors[1] < 0.2


def test_what_this_cpu_cannot_measure_is_said() -> None:
    accuracy = Accuracy(perplexity=1.0, mean_logit_error=0.0, max_logit_error=0.0, same_first_choice=1.0)
    text = text_of(dict.fromkeys(CASES[:6], accuracy), torch.zeros(1, 1), "nothing")
    assert "float32, KV in float32, linears in int8: not measured" in text
    assert "not measured" not in text_of(dict.fromkeys(CASES, accuracy), torch.zeros(1, 1), "nothing")


@pytest.mark.slow
def test_the_exact_model_is_transformers() -> None:
    from blockyard.deploy.settings.options import model_path
    from transformers import AutoModelForCausalLM

    rows = held_out_rows()[:1, :64]
    with torch.no_grad():
        expected = (
            AutoModelForCausalLM.from_pretrained(model_path("demo"), dtype=torch.float32)(rows)
            .logits[0]
            .float()
        )
    torch.testing.assert_close(next(logits_of(EXACT, rows)), expected, atol=2e-3, rtol=2e-3)


def test_capacity_grows_with_the_head() -> None:
    assert capacity_of("int8", 128) > capacity_of("int8", 64) > capacity_of("int8", 32)
