"""Norms, rotary embedding, SiLU-mul and linears of both backends against the reference."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from blockyard.kernels.interface import Backend
from blockyard.kernels.torch import reference
from blockyard.kernels.torch.backend import TorchBackend
from blockyard.kernels.torch.deterministic import DeterministicTorchBackend
from blockyard.kernels.torch.packed_linear import can_pack

AssertNear = Callable[[torch.Tensor, torch.Tensor], None]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-6


def random_tensor(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(device, dtype)


def poisoned_like(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, float("nan"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (3, 100), (17, 128), (65, 16), (2, 1000)])
def test_rms_norm(
    backend: Backend,
    device: torch.device,
    assert_near: AssertNear,
    dtype: torch.dtype,
    rows: int,
    hidden: int,
) -> None:
    x_TH = random_tensor(rows, hidden, dtype=dtype, device=device)
    weight_H = random_tensor(hidden, dtype=dtype, device=device)
    out_TH, expected = poisoned_like(x_TH), poisoned_like(x_TH)
    before = x_TH.clone()
    backend.rms_norm(x_TH, weight_H, EPS, out_TH=out_TH)
    reference.rms_norm(x_TH, weight_H, EPS, out_TH=expected)
    assert_near(out_TH, expected)
    assert torch.equal(x_TH, before)
    backend.rms_norm(x_TH, weight_H, EPS, out_TH=x_TH)
    assert torch.equal(x_TH, out_TH)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(3, 100), (9, 64)])
def test_a_weight_in_fp32_rounds_once_in_every_norm(
    backend: Backend,
    device: torch.device,
    assert_near: AssertNear,
    dtype: torch.dtype,
    rows: int,
    hidden: int,
) -> None:
    """The columns are a part of wider rows, as queries are of a projection."""
    x_TH = random_tensor(rows, 2 * hidden, dtype=dtype, device=device)[:, :hidden]
    weight_H = 1 + random_tensor(hidden, dtype=torch.float32, device=device)
    out_TH, expected = (torch.full_like(x_TH.contiguous(), float("nan")) for _ in range(2))
    backend.rms_norm(x_TH, weight_H, EPS, out_TH=out_TH)
    reference.rms_norm(x_TH, weight_H, EPS, out_TH=expected)
    assert_near(out_TH, expected)
    residual_TH = random_tensor(rows, hidden, dtype=dtype, device=device).flip(0)
    expected_residual = residual_TH.clone()
    reference.rms_norm_add(x_TH, expected_residual, weight_H, EPS)
    backend.rms_norm_add(x_TH.clone(), residual_TH, weight_H, EPS)
    assert_near(residual_TH, expected_residual)
    reference.add_rms_norm(x_TH, expected_residual, weight_H, EPS, out_TH=expected)
    backend.add_rms_norm(x_TH, residual_TH, weight_H, EPS, out_TH=out_TH)
    assert_near(out_TH, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_add_leaves_the_residual_with_the_sum(
    backend: Backend, device: torch.device, assert_near: AssertNear, dtype: torch.dtype
) -> None:
    x_TH, weight_H = (random_tensor(*shape, dtype=dtype, device=device) for shape in ((19, 100), (100,)))
    residual_TH = x_TH.flip(0) * 3
    expected = residual_TH.clone()
    reference.rms_norm_add(x_TH, expected, weight_H, EPS)
    backend.rms_norm_add(x_TH, residual_TH, weight_H, EPS)
    assert_near(residual_TH, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_multiplies_in_place(
    backend: Backend, device: torch.device, assert_near: AssertNear, dtype: torch.dtype
) -> None:
    x_TH = random_tensor(19, 100, dtype=dtype, device=device)
    expected = x_TH * 0.22
    backend.scale(x_TH, 0.22)
    assert_near(x_TH, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (19, 100)])
def test_add_rms_norm_updates_the_residual(
    backend: Backend,
    device: torch.device,
    assert_near: AssertNear,
    dtype: torch.dtype,
    rows: int,
    hidden: int,
) -> None:
    x_TH = random_tensor(rows, hidden, dtype=dtype, device=device)
    residual_TH = x_TH.flip(0) * 3
    weight_H = random_tensor(hidden, dtype=dtype, device=device)
    expected_residual, expected = residual_TH.clone(), poisoned_like(x_TH)
    reference.add_rms_norm(x_TH, expected_residual, weight_H, EPS, out_TH=expected)
    out_TH = poisoned_like(x_TH)
    backend.add_rms_norm(x_TH, residual_TH, weight_H, EPS, out_TH=out_TH)
    if dtype == torch.bfloat16:  # the interpreter truncates to bf16 where the hardware rounds
        assert_near(residual_TH, expected_residual)
    else:
        assert torch.equal(residual_TH, expected_residual)
    assert_near(out_TH, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 16), (14, 2, 64), (5, 5, 32)])
def test_rotary_turns_halves_in_place(
    backend: Backend,
    device: torch.device,
    assert_near: AssertNear,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    fused = random_tensor(9, num_heads + num_kv_heads, head_dim, dtype=dtype, device=device)
    expected = fused.clone()
    angles = torch.outer(torch.arange(40.0), torch.rand(head_dim // 2)).to(device)
    cos_sin_SD = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions_T = torch.tensor([0, 39, 1, 1, 17, 5, 6, 7, 38], device=device)
    backend.rotary(fused[:, :num_heads], fused[:, num_heads:], cos_sin_SD, positions_T)
    reference.rotary(expected[:, :num_heads], expected[:, num_heads:], cos_sin_SD, positions_T)
    assert_near(fused, expected)


def test_rotary_leaves_the_angle_between_query_and_key_to_their_distance(
    backend: Backend, device: torch.device
) -> None:
    q_TND = random_tensor(1, 1, 32, dtype=torch.float32, device=device).expand(2, 1, 32).contiguous()
    k_TKD = q_TND.flip(-1).contiguous()
    angles = torch.outer(torch.arange(50.0), torch.rand(16)).to(device)
    cos_sin_SD = torch.cat((angles.cos(), angles.sin()), dim=-1)
    backend.rotary(q_TND, torch.zeros_like(k_TKD), cos_sin_SD, torch.tensor([9, 40], device=device))
    backend.rotary(k_TKD, torch.zeros_like(k_TKD), cos_sin_SD, torch.tensor([2, 33], device=device))
    near, far = (q_TND * k_TKD).sum(-1).flatten()
    torch.testing.assert_close(near, far, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 1000), (2, 1025)])
@pytest.mark.parametrize("op", ["silu_mul", "gelu_mul"])
def test_activations(
    backend: Backend,
    device: torch.device,
    assert_near: AssertNear,
    dtype: torch.dtype,
    rows: int,
    width: int,
    op: str,
) -> None:
    gate_up_T2I = random_tensor(rows, 2 * width, dtype=dtype, device=device)
    out_TI = poisoned_like(gate_up_T2I[:, :width])
    expected = poisoned_like(out_TI)
    getattr(backend, op)(gate_up_T2I, out_TI=out_TI)
    getattr(reference, op)(gate_up_T2I, out_TI=expected)
    assert_near(out_TI, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 33])
@pytest.mark.parametrize(("width", "with_bias"), [(48, False), (512, True), (512, False)])
def test_linear_is_x_times_weight_transposed_plus_bias(
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    width: int,
    with_bias: bool,
) -> None:
    x_TI = random_tensor(rows, width, dtype=dtype, device=device)
    weight_OI = random_tensor(200, width, dtype=dtype, device=device)
    bias_O = weight_OI[:, 0].contiguous() if with_bias else None
    expected = F.linear(x_TI.float(), weight_OI.float(), None if bias_O is None else bias_O.float())
    for weight in (weight_OI, backend.pack_linear(weight_OI)):
        actual = backend.linear(x_TI, weight, bias_O)
        assert actual.dtype == dtype
        torch.testing.assert_close(
            actual.float(), expected, atol=0.2 if dtype != torch.float32 else 1e-3, rtol=2e-2
        )


def test_a_packed_weight_is_a_copy_of_its_own(backend: Backend, device: torch.device) -> None:
    """The dense one may go, and its memory to another weight."""
    x_TI = random_tensor(2, 512, dtype=torch.float32, device=device)
    expected, packed = [], []
    for seed in range(4):
        weight_OI = torch.randn(512, 512, generator=torch.Generator().manual_seed(seed)).to(device)
        expected.append(x_TI @ weight_OI.t())
        packed.append(backend.pack_linear(weight_OI))
        if packed[-1] is not weight_OI:
            weight_OI.fill_(float("nan"))
        del weight_OI
    for weight, result in zip(packed, expected, strict=True):
        torch.testing.assert_close(backend.linear(x_TI, weight), result, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_weights_are_packed_on_a_cpu_where_pytorch_can(dtype: torch.dtype) -> None:
    """PyTorch refuses to pack bf16 on a CPU without AVX-512, where it multiplies it all the same."""
    backend = TorchBackend()
    large, small = torch.eye(512, dtype=dtype), torch.zeros(16, 16, dtype=dtype)
    packed = backend.pack_linear(large)
    assert packed.is_mkldnn == can_pack(dtype)
    assert torch.equal(backend.linear(large[:3], packed), large[:3])
    assert backend.pack_linear(small) is small
    assert DeterministicTorchBackend().pack_linear(large) is large
