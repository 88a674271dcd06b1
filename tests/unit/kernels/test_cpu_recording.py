"""C++ kernels recorded and called again read the current content of their tensors, and call no PyTorch code."""

from collections.abc import Iterator

import pytest
import torch
from blockyard.kernels.cpu.backend import CpuBackend
from blockyard.kernels.cpu.recording import Arena, NotRecordable
from blockyard.kernels.torch.packed_linear import can_pack, pack

from .rig import EPS, small_plan

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True, params=["inference", "gradients"])
def mode(request: pytest.FixtureRequest) -> Iterator[None]:
    """PyTorch dispatches otherwise where nothing can have a gradient, as in a runner."""
    with torch.inference_mode(request.param == "inference"):
        yield


@pytest.fixture
def backend(cpu_backend: CpuBackend) -> CpuBackend:
    return CpuBackend(cpu_backend.library)


def test_memory_is_lent_again_when_the_last_view_of_it_is_gone() -> None:
    arena = Arena()
    first = arena.empty((4, 100), torch.float32)
    view, address = first[1:].view(-1), first.data_ptr()
    del first
    assert arena.empty((4, 100), torch.float32).data_ptr() != address
    del view
    assert address in {arena.empty((4, 100), torch.float32).data_ptr() for _ in range(2)}
    assert arena.num_bytes == 2 * 2048
    for shape in ((0, 5), (), (1,), (3, 7)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            lent = Arena().empty(shape, dtype)
            assert (tuple(lent.shape), lent.dtype, lent.data_ptr() % 64) == (shape, dtype, 0)


@DTYPES
def test_a_replay_computes_with_what_the_tensors_hold_then(backend: CpuBackend, dtype: torch.dtype) -> None:
    x_TH, residual_TH, weight_H = (torch.randn(*shape).to(dtype) for shape in ((3, 64), (3, 64), (64,)))
    original_TH = residual_TH.clone()

    def compute() -> torch.Tensor:
        out_TH = torch.empty_like(x_TH)
        backend.add_rms_norm(x_TH, residual_TH, weight_H, EPS, out_TH=out_TH)
        halves_TI = out_TH.new_empty(3, 32)
        backend.silu_mul(out_TH, out_TI=halves_TI)
        backend.rms_norm_add(out_TH, residual_TH, weight_H, EPS)
        backend.scale(residual_TH, 0.3)
        backend.gelu_mul(residual_TH, out_TI=halves_TI)
        return halves_TI

    recorded = backend.record(compute, Arena())
    for seed in range(3):
        x_TH.copy_(torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)))
        residual_TH.copy_(original_TH)
        actual = recorded.replay().clone()
        residual_TH.copy_(original_TH)
        assert torch.equal(actual, compute())


def test_one_arena_serves_recordings_of_many_sizes(backend: CpuBackend) -> None:
    arena, weight_H = Arena(), torch.randn(64)
    inputs = [torch.randn(rows, 64) for rows in (1, 2, 3, 4)]

    def normed(x_TH: torch.Tensor) -> torch.Tensor:
        """Compute through a chain of tensors that are each needed for a moment."""
        for _ in range(5):
            out_TH = torch.empty_like(x_TH)
            backend.rms_norm(x_TH, weight_H, EPS, out_TH=out_TH)
            x_TH = out_TH
        return x_TH

    recorded = [backend.record(lambda x_TH=x_TH: normed(x_TH), arena) for x_TH in inputs]
    for step, x_TH in zip(recorded, inputs, strict=True):
        assert torch.equal(step.replay(), normed(x_TH))
    assert arena.num_bytes <= 2 * sum(2 * x_TH.nbytes for x_TH in inputs)


def test_what_pytorch_computes_or_copies_ends_the_recording_and_nothing_else(backend: CpuBackend) -> None:
    x_TH, weight_H = torch.randn(3, 64), torch.randn(64)

    def with_a_sum() -> torch.Tensor:
        out_TH = torch.empty_like(x_TH)
        backend.rms_norm(x_TH, weight_H, EPS, out_TH=out_TH)
        return out_TH + 1

    with pytest.raises(NotRecordable, match="add"):
        backend.record(with_a_sum, Arena())
    assert with_a_sum().isfinite().all()
    for compute in (
        lambda: backend.embed(torch.zeros(4, 8).half(), torch.tensor([1])),  # fp16 is left to PyTorch
        lambda: x_TH.t().reshape(-1),
        lambda: x_TH.t().contiguous(),
        lambda: x_TH.to(torch.float64),
        lambda: torch.clone(x_TH),
    ):
        with pytest.raises(NotRecordable):
            backend.record(compute, Arena())
    for view in (x_TH.contiguous, lambda: x_TH.view(-1), lambda: x_TH.reshape(-1), lambda: x_TH.flatten(0)):
        assert backend.record(view, Arena()).replay().data_ptr() == x_TH.data_ptr()


@DTYPES
def test_a_weight_that_tells_no_address_ends_the_recording(backend: CpuBackend, dtype: torch.dtype) -> None:
    if not can_pack(dtype):
        pytest.skip("PyTorch packs no such weight here")
    weight_OI, x_TI = pack(torch.randn(328, 256, dtype=dtype)), torch.randn(2, 256, dtype=dtype)
    assert weight_OI.is_mkldnn
    for compute in (
        lambda: backend.linear(x_TI, weight_OI),
        lambda: backend.linear(x_TI[:0], weight_OI) + 1,
        weight_OI.detach,
        weight_OI.t,
        weight_OI.to_dense,
    ):
        with pytest.raises(NotRecordable):
            backend.record(compute, Arena())


def test_every_plan_of_a_recording_is_looked_at_again(backend: CpuBackend) -> None:
    plans = [small_plan([1], [3], [[block]]) for block in (0, 1)]
    pool_B2KPD, k_TKD = torch.zeros(2, 2, 1, 16, 16), torch.randn(1, 1, 16)

    def write_both() -> torch.Tensor:
        for plan in plans:
            backend.write_kv(k_TKD, k_TKD, pool_B2KPD, plan)
        return k_TKD.view(-1)

    recorded = backend.record(write_both, Arena())
    for plan in plans:
        plan.slot_mapping_T.fill_(32)
        with pytest.raises(ValueError, match="a slot beyond"):
            recorded.replay()
        plan.slot_mapping_T.fill_(0)


def test_a_replay_refuses_a_plan_that_has_come_to_point_elsewhere(backend: CpuBackend) -> None:
    plan = small_plan([1], [18], [[0, 1]])
    pool_B2KPD, cos_sin_SD = torch.zeros(2, 2, 1, 16, 16), torch.ones(20, 16)
    heads_TXD, q_TND, out_TND = torch.randn(1, 3, 16), torch.randn(1, 1, 16), torch.empty(1, 1, 16)

    def compute() -> torch.Tensor:
        backend.qk_norm_rope_write(heads_TXD, None, cos_sin_SD, pool_B2KPD, plan)
        backend.attention(q_TND, pool_B2KPD, plan, scale=1.0, out_TND=out_TND)
        return out_TND

    recorded = backend.record(compute, Arena())
    recorded.replay()
    for tensor, value, told in (
        (plan.block_table_RB, 2, "a block beyond"),
        (plan.slot_mapping_T, 32, "a slot beyond"),
        (plan.positions_T, 20, "21 positions"),
        (plan.context_lens_R, 16 * plan.block_table_RB.shape[1] + 1, "a table shorter"),
    ):
        before = tensor.clone()
        tensor.fill_(value)
        with pytest.raises(ValueError, match=told):
            recorded.replay()
        tensor.copy_(before)
    recorded.replay()


@DTYPES
def test_a_token_that_the_table_does_not_have_is_nan(backend: CpuBackend, dtype: torch.dtype) -> None:
    table_VH = torch.randn(5, 24).to(dtype)
    rows_TH = backend.embed(table_VH, torch.tensor([4, -1, 0, 5, 2**40]))
    assert torch.equal(rows_TH[[0, 2]], table_VH[[4, 0]])
    assert rows_TH[[1, 3, 4]].isnan().all()
    with pytest.raises(ValueError, match="tokens of"):
        backend.embed(table_VH, torch.tensor([1], dtype=torch.int32))
