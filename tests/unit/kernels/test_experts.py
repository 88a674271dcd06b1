"""Experts of every backend against the reference: any number of tokens, idle experts, one that gets all, and ties."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from blockyard.kernels.cpu.backend import CpuBackend
from blockyard.kernels.cpu.extension import ExtensionUnavailable, load_extension
from blockyard.kernels.cpu.library import CpuLibrary
from blockyard.kernels.interface import Backend
from blockyard.kernels.quantised import Fp8Weight, QuantisedWeight, dequantised
from blockyard.kernels.selection import choose_backend
from blockyard.kernels.torch import reference
from blockyard.kernels.torch.deterministic import DeterministicTorchBackend
from blockyard.kernels.torch.experts import choose_experts
from blockyard.kernels.triton.linears.weights import TiledExperts

from bench.kernels import expert_cases
from bench.kernels.case import Bench

from .test_triton_linears import fp8_weight, int4_weight, int8_weight, moved

HIDDEN, INNER = 96, 48
WIDE_INNER = 64
"""Inner rows that are whole groups of 32."""


def tensors(
    num_tokens: int, num_experts: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (std * torch.randn(shape, generator=generator)).to(device, dtype)

    return {
        "x_TH": normal(num_tokens, HIDDEN),
        "logits_TE": normal(num_tokens, num_experts),
        "gate_up_E2IH": normal(num_experts, 2 * INNER, HIDDEN, std=0.1),
        "down_EHI": normal(num_experts, HIDDEN, INNER, std=0.1),
    }


def check(backend: Backend, given: dict[str, Any], *, tolerance: float = 1e-5, **options: Any) -> None:
    expected = reference.experts(**given, **options)
    weights = {name: backend.pack_experts(given[name].clone()) for name in ("gate_up_E2IH", "down_EHI")}
    actual = backend.experts(given["x_TH"], given["logits_TE"], **weights, **options)
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_experts_are_those_of_the_reference(
    backend: Backend, device: torch.device, num_tokens: int, normalizes: bool
) -> None:
    check(backend, tensors(num_tokens, 6, device), top_k=3, normalizes=normalizes)


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (2, 2), (20, 5)])
def test_any_number_of_experts(backend: Backend, device: torch.device, num_experts: int, top_k: int) -> None:
    check(backend, tensors(9, num_experts, device), top_k=top_k, normalizes=True)


def test_bfloat16_is_rounded_where_the_dense_mlp_is(backend: Backend, device: torch.device) -> None:
    check(backend, tensors(33, 6, device, torch.bfloat16), tolerance=3e-2, top_k=2, normalizes=True)


def test_int8_is_as_near_as_its_linears_are() -> None:
    given = tensors(33, 6, torch.device("cpu"))
    backend = CpuBackend(library_or_skip(), linears="int8")
    if not backend.library.has_int8:
        pytest.skip("this CPU has no int8 linear")
    check(backend, given, tolerance=3e-2, top_k=2, normalizes=True)


def library_or_skip() -> CpuLibrary:
    try:
        return load_extension()
    except ExtensionUnavailable as error:
        if shutil.which("g++"):
            raise
        pytest.skip(str(error))


def quantised_experts(name: str, num_experts: int, outputs: int, inputs: int, dtype: torch.dtype) -> Any:
    """Return a weight of each expert, no two alike."""

    def make(expert: int) -> QuantisedWeight:
        weight = FORMS[name](outputs, inputs, dtype)
        scale = "scale" if isinstance(weight, Fp8Weight) else "scale_OG"
        return replace(weight, **{scale: getattr(weight, scale) * (1 + expert / 4)})

    return [make(expert) for expert in range(num_experts)]


FORMS: dict[str, Callable[[int, int, torch.dtype], QuantisedWeight]] = {
    "int4, groups": lambda *shape: int4_weight(*shape[:2], 32, shape[2]),
    "int4, symmetric": lambda *shape: int4_weight(*shape[:2], 32, shape[2], has_zeros=False),
    "int4, act order": lambda *shape: int4_weight(*shape[:2], 32, shape[2], has_order=True),
    "int4, small groups": lambda *shape: int4_weight(*shape[:2], 16, shape[2]),
    "int8, one group": lambda *shape: int8_weight(*shape[:2], shape[1], shape[2]),
    "int8, zero points": lambda *shape: int8_weight(*shape[:2], 32, shape[2], has_zeros=True),
    "fp8, outputs": lambda *shape: fp8_weight(*shape[:2], None, shape[2]),
    "fp8, blocks": lambda *shape: fp8_weight(*shape[:2], (32, 32), shape[2]),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("num_tokens", [1, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_experts_are_those_of_the_same_plain_numbers(
    backend: Backend, device: torch.device, name: str, num_tokens: int, dtype: torch.dtype
) -> None:
    given = tensors(num_tokens, 5, device, dtype)
    given["gate_up_E2IH"] = quantised_experts(name, 5, 2 * WIDE_INNER, HIDDEN, dtype)
    given["down_EHI"] = quantised_experts(name, 5, HIDDEN, WIDE_INNER, dtype)
    weights = {
        field: backend.pack_experts([moved(weight, device) for weight in given[field]])
        for field in ("gate_up_E2IH", "down_EHI")
    }
    if backend.name == "triton":
        are_tiled = [isinstance(weight, TiledExperts) for weight in weights.values()]
        assert are_tiled == [name != "int4, small groups"] * 2
    options = {"top_k": 3, "normalizes": True}
    actual = backend.experts(given["x_TH"], given["logits_TE"], **weights, **options)
    for field in weights:
        given[field] = torch.stack([dequantised(weight) for weight in given[field]]).to(device)
    expected = reference.experts(**given, **options)
    tolerance = (1e-4 if dtype == torch.float32 else 3e-2) * float(expected.abs().max())
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", ["gate_up_E2IH", "down_EHI", "x_TH", "logits_TE"])
def test_tensors_that_do_not_fit_are_refused(name: str, device: torch.device) -> None:
    given = tensors(4, 6, device)
    on_cpu = [CpuBackend(library_or_skip())] if device.type == "cpu" else []
    for backend in (*on_cpu, choose_backend(device, requested="triton")):
        packed = {weight: backend.pack_experts(given[weight]) for weight in ("gate_up_E2IH", "down_EHI")}
        wrong = given | packed
        wrong[name] = wrong[name][:-1]
        with pytest.raises(ValueError, match="experts"):
            backend.experts(**wrong, top_k=2, normalizes=True)


def test_quantised_experts_that_do_not_fit_are_refused(device: torch.device) -> None:
    given = tensors(4, 5, device)
    on_cpu = [CpuBackend(library_or_skip())] if device.type == "cpu" else []
    for backend in (*on_cpu, choose_backend(device, requested="triton")):
        for outputs, inputs, count in ((HIDDEN, WIDE_INNER, 4), (2 * HIDDEN, WIDE_INNER, 5), (HIDDEN, 96, 5)):
            gate_up = quantised_experts("int4, groups", 5, 2 * WIDE_INNER, HIDDEN, torch.float32)
            down = quantised_experts("int4, groups", count, outputs, inputs, torch.float32)
            packed = [
                backend.pack_experts([moved(one, device) for one in weights]) for weights in (gate_up, down)
            ]
            with pytest.raises(ValueError, match="experts"):
                backend.experts(given["x_TH"], given["logits_TE"], *packed, top_k=2, normalizes=True)


def test_a_matrix_in_groups_that_are_too_small_leaves_the_other_quantised(
    backend: Backend, device: torch.device
) -> None:
    given = tensors(9, 5, device)
    given["gate_up_E2IH"] = quantised_experts("int4, groups", 5, 2 * 48, HIDDEN, torch.float32)
    given["down_EHI"] = quantised_experts("int4, small groups", 5, HIDDEN, 48, torch.float32)
    packed = {
        field: backend.pack_experts([moved(weight, device) for weight in given[field]])
        for field in ("gate_up_E2IH", "down_EHI")
    }
    options = {"top_k": 2, "normalizes": False}
    actual = backend.experts(given["x_TH"], given["logits_TE"], **packed, **options)
    for field in packed:
        given[field] = torch.stack([dequantised(weight) for weight in given[field]]).to(device)
    expected = reference.experts(**given, **options)
    torch.testing.assert_close(actual, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


def test_one_expert_that_gets_all_tokens_leaves_the_others_idle(
    backend: Backend, device: torch.device
) -> None:
    given = tensors(37, 6, device)
    given["logits_TE"][:, 4] = 50.0
    check(backend, given, top_k=1, normalizes=True)


def test_of_equal_logits_the_first_experts_are_chosen(backend: Backend, device: torch.device) -> None:
    given = tensors(5, 8, device)
    given["logits_TE"] = given["logits_TE"].round()
    given["logits_TE"][0] = 0.0
    check(backend, given, top_k=3, normalizes=False)
    experts_TK, _ = choose_experts(given["logits_TE"], 3, normalizes=False)
    assert experts_TK[0].tolist() == [0, 1, 2]


def test_a_token_with_nan_fails_alone(backend: Backend, device: torch.device) -> None:
    given = tensors(20, 6, device)
    options = {"top_k": 2, "normalizes": True}
    weights = {name: backend.pack_experts(given[name].clone()) for name in ("gate_up_E2IH", "down_EHI")}
    expected = backend.experts(given["x_TH"], given["logits_TE"], **weights, **options)
    given["x_TH"][3] = float("nan")
    given["logits_TE"][3] = float("nan")
    given["logits_TE"][7, 2] = float("inf")
    actual = backend.experts(given["x_TH"], given["logits_TE"], **weights, **options)
    assert actual.isfinite().all(dim=-1).tolist() == [token not in (3, 7) for token in range(20)]
    others = [token for token in range(20) if token not in (3, 7)]
    torch.testing.assert_close(actual[others], expected[others])


@pytest.mark.parametrize("num_experts", [6, 13])
def test_a_token_has_the_same_bits_alone_and_in_company(num_experts: int) -> None:
    backend = DeterministicTorchBackend()
    given = tensors(50, num_experts, torch.device("cpu"))
    options = {"top_k": 3, "normalizes": False}

    def run(tokens: slice) -> torch.Tensor:
        x_TH, logits_TE = given["x_TH"][tokens], given["logits_TE"][tokens]
        return backend.experts(x_TH, logits_TE, given["gate_up_E2IH"], given["down_EHI"], **options)

    together = run(slice(None))
    for token in range(0, 50, 7):
        assert torch.equal(run(slice(token, token + 1))[0], together[token])
    assert torch.equal(torch.cat([run(slice(0, 17)), run(slice(17, 50))]), together)


def test_the_benchmark_runs_every_form_in_turns(backend: Backend, device: torch.device) -> None:
    setting = Bench(backend=backend, device=device, dtype=torch.float32)
    shape = expert_cases.ExpertShape(model="tiny", hidden=128, inner=128, experts=3, top_k=2)
    forms = expert_cases.FORMS.get(backend.name, ())
    every = list(expert_cases.experts(setting, shape, 8))
    assert [case.kernel for case in every] == ["experts", *(f"experts, {form}" for form in forms)]
    assert {case.turns for case in every} == {"tiny experts 8" if forms else ""}
    for case in every:
        result = case.make()()
        assert isinstance(result, torch.Tensor)
        assert bool(result.isfinite().all())
