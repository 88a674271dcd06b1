"""Experts of every backend against the reference: any number of tokens, idle experts, one that gets all, and ties."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from blockyard.kernels.cpu.backend import CpuBackend
from blockyard.kernels.interface import Backend
from blockyard.kernels.quantised import Fp8Weight, QuantisedWeight, dequantised
from blockyard.kernels.torch import reference
from blockyard.kernels.torch.deterministic import DeterministicTorchBackend
from blockyard.kernels.torch.experts import choose_experts
from blockyard.kernels.triton.linears.weights import TiledExperts

from .rig import CPU, DEVICE, NAN, crossed, on_each_backend
from .weights import fp8_weight, int4_weight, int8_weight, moved

BackendOf = Callable[[str], Backend]
HIDDEN, INNER = 96, 48
WIDE_INNER = 64
"""Inner rows that are whole groups of 32."""
WEIGHTS = ("gate_up_E2IH", "down_EHI")
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


def tensors(
    num_tokens: int, num_experts: int, dtype: torch.dtype = torch.float32, device: torch.device = DEVICE
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


def quantised_experts(name: str, outputs: int, inputs: int, dtype: torch.dtype, count: int = 5) -> Any:
    """Return a weight of each expert, no two alike."""

    def make(expert: int) -> QuantisedWeight:
        weight = FORMS[name](outputs, inputs, dtype)
        scale = "scale" if isinstance(weight, Fp8Weight) else "scale_OG"
        return replace(weight, **{scale: getattr(weight, scale) * (1 + expert / 4)})

    return [moved(make(expert)) for expert in range(count)]


def packed(backend: Backend, given: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors with weights of the backend, which are packed from copies."""
    weights = (
        list(given[name]) if isinstance(given[name], list) else given[name].clone() for name in WEIGHTS
    )
    return given | dict(zip(WEIGHTS, map(backend.pack_experts, weights), strict=True))


def check(backend: Backend, given: dict[str, Any], *, share: float = 1e-5, **options: Any) -> None:
    """Compare with the reference. Results may be off by a share of the largest, or of 1 for plain weights."""
    actual = backend.experts(**packed(backend, given), **options)
    is_quantised = isinstance(given["down_EHI"], list)
    for name in WEIGHTS if is_quantised else ():
        given = given | {name: torch.stack([dequantised(weight) for weight in given[name]])}
    expected = reference.experts(**given, **options)
    tolerance = share * float(expected.abs().max()) if is_quantised else share
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0 if is_quantised else share)


PLAIN = {
    "33 tokens, 6 experts": (33, 6, 3, True),
    "no token": (0, 6, 3, False),
    "1 token": (1, 6, 3, False),
    "1 expert": (9, 1, 1, True),
    "all experts": (9, 2, 2, True),
    "20 experts": (9, 20, 5, True),
    "33 tokens, sums as they are": (33, 6, 3, False),
}


@on_each_backend(PLAIN)
def test_experts_are_those_of_the_reference(
    backend_of: BackendOf, run: tuple[str, tuple[int, int, int, bool]]
) -> None:
    num_tokens, num_experts, top_k, normalizes = run[1]
    check(backend_of(run[0]), tensors(num_tokens, num_experts), top_k=top_k, normalizes=normalizes)


def test_bfloat16_is_rounded_where_the_dense_mlp_is(backend: Backend) -> None:
    check(backend, tensors(33, 6, torch.bfloat16), share=3e-2, top_k=2, normalizes=True)


def test_int8_is_as_near_as_its_linears_are(cpu_backend: CpuBackend) -> None:
    if not cpu_backend.library.has_int8:
        pytest.skip("this CPU has no int8 linear")
    check(
        CpuBackend(cpu_backend.library, linears="int8"), tensors(33, 6), share=3e-2, top_k=2, normalizes=True
    )


@on_each_backend(
    crossed(name=list(FORMS), num_tokens=[1, 33], dtype=[torch.float32, torch.bfloat16]),
    usual=8,
    interpreted=2,
)
def test_quantised_experts_are_those_of_the_same_plain_numbers(
    backend_of: BackendOf, run: tuple[str, dict[str, Any]]
) -> None:
    backend, name, dtype = backend_of(run[0]), run[1]["name"], run[1]["dtype"]
    given = tensors(run[1]["num_tokens"], 5, dtype)
    given["gate_up_E2IH"] = quantised_experts(name, 2 * WIDE_INNER, HIDDEN, dtype)
    given["down_EHI"] = quantised_experts(name, HIDDEN, WIDE_INNER, dtype)
    if backend.name == "triton":
        weights = packed(backend, given)
        are_tiled = [isinstance(weights[field], TiledExperts) for field in WEIGHTS]
        assert are_tiled == [name != "int4, small groups"] * 2
    check(backend, given, share=1e-4 if dtype == torch.float32 else 3e-2, top_k=3, normalizes=True)


def test_a_matrix_in_groups_that_are_too_small_leaves_the_other_quantised(backend: Backend) -> None:
    given = tensors(9, 5)
    given["gate_up_E2IH"] = quantised_experts("int4, groups", 2 * 48, HIDDEN, torch.float32)
    given["down_EHI"] = quantised_experts("int4, small groups", HIDDEN, 48, torch.float32)
    check(backend, given, share=1e-4, top_k=2, normalizes=False)


def test_tensors_that_do_not_fit_are_refused(backend: Backend) -> None:
    if backend.name == "torch":
        pytest.skip("PyTorch refuses by itself")
    sound = packed(backend, tensors(4, 6))
    wrong = [sound | {name: sound[name][:-1]} for name in sound]
    for outputs, inputs, count in ((HIDDEN, WIDE_INNER, 4), (2 * HIDDEN, WIDE_INNER, 5), (HIDDEN, 96, 5)):
        weights = {
            "gate_up_E2IH": quantised_experts("int4, groups", 2 * WIDE_INNER, HIDDEN, torch.float32),
            "down_EHI": quantised_experts("int4, groups", outputs, inputs, torch.float32, count),
        }
        wrong.append(packed(backend, tensors(4, 5) | weights))
    for given in wrong:
        with pytest.raises(ValueError, match="experts"):
            backend.experts(**given, top_k=2, normalizes=True)


def test_one_expert_may_get_all_tokens_and_of_equal_logits_the_first_are_chosen(backend: Backend) -> None:
    alone, equal = tensors(37, 6), tensors(5, 8)
    alone["logits_TE"][:, 4] = 50.0
    check(backend, alone, top_k=1, normalizes=True)
    equal["logits_TE"] = equal["logits_TE"].round()
    equal["logits_TE"][0] = 0.0
    check(backend, equal, top_k=3, normalizes=False)
    assert choose_experts(equal["logits_TE"], 3, normalizes=False)[0][0].tolist() == [0, 1, 2]


def test_a_token_with_nan_fails_alone(backend: Backend) -> None:
    given = packed(backend, tensors(20, 6))
    expected = backend.experts(**given, top_k=2, normalizes=True)
    given["x_TH"][3] = NAN
    given["logits_TE"][3] = NAN
    given["logits_TE"][7, 2] = float("inf")
    actual = backend.experts(**given, top_k=2, normalizes=True)
    others = [token for token in range(20) if token not in (3, 7)]
    assert actual.isfinite().all(dim=-1).nonzero().flatten().tolist() == others
    torch.testing.assert_close(actual[others], expected[others])


@pytest.mark.parametrize("num_experts", [6, 13])
def test_a_token_has_the_same_bits_alone_and_in_company(num_experts: int) -> None:
    backend, given = DeterministicTorchBackend(), tensors(50, num_experts, device=CPU)

    def run(tokens: slice) -> torch.Tensor:
        own = {name: given[name][tokens] for name in ("x_TH", "logits_TE")}
        return backend.experts(**given | own, top_k=3, normalizes=False)

    together = run(slice(None))
    for token in range(0, 50, 7):
        assert torch.equal(run(slice(token, token + 1))[0], together[token])
    assert torch.equal(torch.cat([run(slice(0, 17)), run(slice(17, 50))]), together)
