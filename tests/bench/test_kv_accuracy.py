"""The accuracy bench measures what it says: the exact model has no error, coarser caches have some."""

import pytest
import torch

from bench.kv_accuracy import (
    CASES,
    EXACT,
    Case,
    capacity_of,
    cases_here,
    floors_of,
    held_out_rows,
    logits_of,
    measure,
)


def test_errors_are_differences_from_the_exact_model() -> None:
    rows = held_out_rows()[:2, :96]
    measured = measure(rows)
    assert tuple(measured) == cases_here()
    exact = measured[EXACT]
    assert (exact.mean_logit_error, exact.max_logit_error, exact.same_first_choice) == (0.0, 0.0, 1.0)
    int8, fp8 = (measured[Case(dtype="float32", kv_cache_dtype=kv)] for kv in ("int8", "fp8"))
    assert 0 < int8.mean_logit_error < fp8.mean_logit_error < 0.5
    assert int8.max_logit_error > int8.mean_logit_error
    assert all(0.9 < accuracy.perplexity / exact.perplexity < 1.1 for accuracy in measured.values())
    floors = floors_of(measured)
    assert len(floors) == len(measured) - 1 + 2
    assert floors[-1].value == pytest.approx(128 / 68)


def test_linears_in_int8_are_measured_where_the_cpu_has_them() -> None:
    rows = held_out_rows()[:1, :64]
    for case in cases_here():
        if case.linears == "int8":
            logits, exact = (next(logits_of(which, rows)) for which in (case, EXACT))
            assert 1e-3 < float((logits - exact).abs().mean()) < 0.5
    assert {case.linears for case in CASES} == {"full", "int8"}


def test_the_exact_model_is_transformers() -> None:
    from blockyard.deploy.options import model_path
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
