"""Norms, rotary embedding, activations and linears of each backend against the reference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from blockyard.kernels.interface import Backend
from blockyard.kernels.torch import reference
from blockyard.kernels.torch.backend import TorchBackend
from blockyard.kernels.torch.deterministic import DeterministicTorchBackend
from blockyard.kernels.torch.packed_linear import can_pack

from .rig import (
    CPU,
    DEVICE,
    EPS,
    FLOATS,
    NAN,
    TOLERANCES,
    assert_near,
    crossed,
    normal,
    on_each_backend,
    rotary_table,
)

BackendOf = Callable[[str], Backend]
Run = tuple[str, dict[str, Any]]
SHAPES = [(1, 64), (3, 100), (17, 128), (65, 16), (2, 1000)]


@on_each_backend(
    crossed(shape=SHAPES, dtype=FLOATS, weight=["as x", "fp32"], columns=["all", "part"]), usual=5
)
def test_norms_are_the_references(backend_of: BackendOf, run: Run) -> None:
    """The columns may be a part of wider rows, as queries are of a projection. A weight in fp32 rounds once."""
    backend, (rows, hidden), dtype = backend_of(run[0]), run[1]["shape"], run[1]["dtype"]
    x_TH = normal(rows, hidden * 2, dtype=dtype)[:, :hidden]
    x_TH = x_TH.contiguous() if run[1]["columns"] == "all" else x_TH
    weight_H = 1 + 0.2 * normal(hidden, dtype=torch.float32 if run[1]["weight"] == "fp32" else dtype)
    before, residual_TH = x_TH.clone(), 3 * normal(rows, hidden, dtype=dtype, seed=8)
    out_TH, expected = (torch.full_like(before, NAN) for _ in range(2))
    backend.rms_norm(x_TH, weight_H, EPS, out_TH=out_TH)
    reference.rms_norm(x_TH, weight_H, EPS, out_TH=expected)
    assert_near(out_TH, expected)
    assert torch.equal(x_TH, before)
    in_place_TH = before.clone()
    backend.rms_norm(in_place_TH, weight_H, EPS, out_TH=in_place_TH)
    assert torch.equal(in_place_TH, out_TH)

    expected_residual = residual_TH.clone()
    reference.add_rms_norm(x_TH, expected_residual, weight_H, EPS, out_TH=expected)
    backend.add_rms_norm(x_TH, residual_TH, weight_H, EPS, out_TH=out_TH.fill_(NAN))
    if dtype == torch.bfloat16:  # the interpreter truncates to bf16 where the hardware rounds
        assert_near(residual_TH, expected_residual)
    else:
        assert torch.equal(residual_TH, expected_residual)
    assert_near(out_TH, expected)
    residual_TH = normal(rows, hidden, dtype=dtype, seed=9)
    expected_residual = residual_TH.clone()
    reference.rms_norm_add(x_TH, expected_residual, weight_H, EPS)
    backend.rms_norm_add(before.clone(), residual_TH, weight_H, EPS)
    assert_near(residual_TH, expected_residual, 2 * TOLERANCES[dtype])


def test_scale_multiplies_in_place(backend: Backend) -> None:
    for dtype in FLOATS:
        x_TH = normal(19, 100, dtype=dtype)
        expected = x_TH * 0.22
        backend.scale(x_TH, 0.22)
        assert_near(x_TH, expected)


@on_each_backend(crossed(heads=[(1, 1, 16), (14, 2, 64), (5, 5, 32)], dtype=FLOATS), usual=3)
def test_rotary_turns_halves_in_place(backend_of: BackendOf, run: Run) -> None:
    num_heads, num_kv_heads, head_dim = run[1]["heads"]
    fused = normal(9, num_heads + num_kv_heads, head_dim, dtype=run[1]["dtype"])
    expected, cos_sin_SD = fused.clone(), rotary_table(40, head_dim)
    positions_T = torch.tensor([0, 39, 1, 1, 17, 5, 6, 7, 38], device=DEVICE)
    backend_of(run[0]).rotary(fused[:, :num_heads], fused[:, num_heads:], cos_sin_SD, positions_T)
    reference.rotary(expected[:, :num_heads], expected[:, num_heads:], cos_sin_SD, positions_T)
    assert_near(fused, expected)


def test_rotary_leaves_the_angle_between_query_and_key_to_their_distance(backend: Backend) -> None:
    q_TND = normal(1, 1, 32).expand(2, 1, 32).contiguous()
    k_TKD, cos_sin_SD = q_TND.flip(-1).contiguous(), rotary_table(50, 32)
    for heads, positions in ((q_TND, [9, 40]), (k_TKD, [2, 33])):
        backend.rotary(heads, torch.zeros_like(heads), cos_sin_SD, torch.tensor(positions, device=DEVICE))
    near, far = (q_TND * k_TKD).sum(-1).flatten()
    torch.testing.assert_close(near, far, atol=1e-4, rtol=1e-4)


@on_each_backend(
    crossed(shape=[(1, 16), (3, 1000), (2, 1025)], dtype=FLOATS, op=["silu_mul", "gelu_mul"]), usual=3
)
def test_activations_are_the_references(backend_of: BackendOf, run: Run) -> None:
    rows, width = run[1]["shape"]
    gate_up_T2I = normal(rows, 2 * width, dtype=run[1]["dtype"])
    out_TI, expected = (torch.full_like(gate_up_T2I[:, :width], NAN) for _ in range(2))
    getattr(backend_of(run[0]), run[1]["op"])(gate_up_T2I, out_TI=out_TI)
    getattr(reference, run[1]["op"])(gate_up_T2I, out_TI=expected)
    assert_near(out_TI, expected)


@on_each_backend(
    crossed(shape=[(0, 48, False), (1, 512, True), (33, 512, False), (33, 48, True)], dtype=FLOATS), usual=4
)
def test_linear_is_x_times_weight_transposed_plus_bias(backend_of: BackendOf, run: Run) -> None:
    backend, (rows, width, has_bias), dtype = backend_of(run[0]), run[1]["shape"], run[1]["dtype"]
    x_TI, weight_OI = normal(rows, width, dtype=dtype), normal(200, width, dtype=dtype, seed=8)
    bias_O = weight_OI[:, 0].contiguous() if has_bias else None
    expected = F.linear(x_TI.float(), weight_OI.float(), None if bias_O is None else bias_O.float())
    for weight in (weight_OI, backend.pack_linear(weight_OI)):
        actual = backend.linear(x_TI, weight, bias_O)
        assert actual.dtype == dtype
        tolerance = 0.2 if dtype != torch.float32 else 1e-3
        torch.testing.assert_close(actual.float(), expected, atol=tolerance, rtol=2e-2)


def test_a_packed_weight_is_a_copy_of_its_own(backend: Backend) -> None:
    """The dense one may go, and its memory to another weight."""
    x_TI, expected, packed = normal(2, 512), [], []
    for seed in range(4):
        weight_OI = normal(512, 512, seed=seed)
        expected.append(x_TI @ weight_OI.t())
        packed.append(backend.pack_linear(weight_OI))
        if packed[-1] is not weight_OI:
            weight_OI.fill_(NAN)
        del weight_OI
    for weight, result in zip(packed, expected, strict=True):
        torch.testing.assert_close(backend.linear(x_TI, weight), result, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", FLOATS)
def test_large_weights_are_packed_on_a_cpu_where_pytorch_can(dtype: torch.dtype) -> None:
    """PyTorch refuses to pack bf16 on a CPU without AVX-512, where it multiplies it all the same."""
    backend, large, small = TorchBackend(), torch.eye(512, dtype=dtype), torch.zeros(16, 16, dtype=dtype)
    packed = backend.pack_linear(large)
    assert packed.device == CPU
    assert packed.is_mkldnn == can_pack(dtype)
    assert torch.equal(backend.linear(large[:3], packed), large[:3])
    assert backend.pack_linear(small) is small
    assert DeterministicTorchBackend().pack_linear(large) is large
