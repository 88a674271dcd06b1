"""Random steps over poisoned pools, quantised weights and comparisons that the tests of kernels share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import pytest
import torch
from blockyard.kernels.attention.plan import AttentionPlan, plan_attention
from blockyard.kernels.cpu.backend import CpuBackend, from_native, to_native
from blockyard.kernels.interface import Backend, HeadNorms
from blockyard.kernels.kv_pool import numbers_of, pool_shape, quantise, scales_of
from blockyard.kernels.torch import reference

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")
EPS = 1e-6
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
FLOATS = list(TOLERANCES)
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def on_each_backend(
    cases: Mapping[str, Any], *, usual: int | None = None, interpreted: int | None = None
) -> Callable[[Any], Any]:
    """Parametrise `run` by a backend's name and a case.

    Unless by night or on a GPU, each backend tries the first `usual` cases, and Triton's interpreter `interpreted`.
    """
    usual = len(cases) if usual is None else usual
    counts = {"torch": usual, "cpu": usual, "triton": usual if interpreted is None else interpreted}
    runs = [
        pytest.param((name, case), id=f"{name}-{key}")
        for is_usual in (True, False)
        for name, count in counts.items()
        for number, (key, case) in enumerate(cases.items())
        if (number < count) == is_usual
    ]
    quick = pytest.mark.quick_cases(min(sum(counts.values()), len(runs)) if DEVICE == CPU else len(runs))
    return lambda test: quick(pytest.mark.parametrize("run", runs)(test))


def crossed(**values: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Return all combinations by names. The first few have each value once."""
    width = max(map(len, values.values()))
    first = [[options[at % len(options)] for options in values.values()] for at in range(width)]
    every = [dict(zip(values, each, strict=True)) for each in (*first, *product(*values.values()))]
    return {" ".join(str(value).removeprefix("torch.") for value in each.values()): each for each in every}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 7, on: Any = DEVICE) -> torch.Tensor:
    return torch.randn(shape, generator=seeded(seed)).to(on, dtype)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    tolerance = TOLERANCES[actual.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(
        actual.float(), expected.float(), atol=tolerance, rtol=tolerance, equal_nan=True
    )


def with_threads(count: int, compute: Callable[[], Any]) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return compute()
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A planned step, its queries, and a pool with NaN in every slot beyond the contexts."""

    plan: AttentionPlan
    q_TND: torch.Tensor
    kv_pool_B2KPD: torch.Tensor
    scale: float

    def attend(
        self, backend: Any, plan: AttentionPlan | None = None, q_TND: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the output of a backend or of the reference, which may leave NaN where it writes nothing."""
        queries = self.q_TND if q_TND is None else q_TND
        out_TND = torch.full(queries.shape, NAN, dtype=queries.dtype, device=queries.device)
        backend.attention(queries, self.kv_pool_B2KPD, plan or self.plan, scale=self.scale, out_TND=out_TND)
        return out_TND

    def expected(self, plan: AttentionPlan | None = None, q_TND: torch.Tensor | None = None) -> torch.Tensor:
        """Return the output of the reference, which has no NaN."""
        out_TND = self.attend(reference, plan, q_TND)
        assert not out_TND.isnan().any()
        return out_TND


def make_step(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    on: torch.device = DEVICE,
    shared_blocks: Sequence[int] = (),
    **plan_options: Any,
) -> Step:
    """Make a random step. Row i shares its first `shared_blocks[i]` blocks with the longest row."""
    generator = seeded(sum(context_lens))
    counts = [-(-context_len // block_size) for context_len in context_lens]
    num_blocks = sum(counts) + 3
    scattered = iter(torch.randperm(num_blocks, generator=generator).tolist())
    tables = [list(islice(scattered, count)) for count in counts]
    for table, shared in zip(tables, shared_blocks, strict=False):
        table[:shared] = max(tables, key=len)[:shared]
    pool = torch.full((num_blocks, 2, num_kv_heads, block_size, head_dim), NAN)
    for table, context_len in zip(tables, context_lens, strict=True):
        for index, block in enumerate(table):
            filled = pool[block, :, :, : context_len - index * block_size]
            filled.copy_(torch.randn(filled.shape, generator=generator))
    q_TND = torch.randn((sum(query_lens), num_heads, head_dim), generator=generator)
    return Step(
        plan=plan_attention(
            query_lens=query_lens,
            context_lens=context_lens,
            block_tables=tables,
            block_size=block_size,
            device=on,
            num_kv_heads=num_kv_heads,
            **plan_options,
        ),
        q_TND=q_TND.to(on, dtype),
        kv_pool_B2KPD=pool.to(on, dtype) if kv_dtype is None else quantised_pool(pool, kv_dtype).to(on),
        scale=head_dim**-0.5,
    )


def small_plan(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    block_size: int = 16,
    num_kv_heads: int = 1,
    **options: Any,
) -> AttentionPlan:
    """Return a plan on the CPU."""
    return plan_attention(
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=block_tables,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        **{"device": "cpu", **options},
    )


def quantised_pool(kv_pool_B2KPD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the same heads in 8 bits. NaN becomes the scale of what was NaN."""
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_pool_B2KPD.shape
    pool = torch.zeros(pool_shape(num_blocks, num_kv_heads, block_size, head_dim, dtype), dtype=dtype)
    numbers, scales = quantise(kv_pool_B2KPD, dtype)
    numbers_of(pool).copy_(numbers)
    scales_of(pool).copy_(scales)
    return pool


class OnPlainPools(CpuBackend):
    """The CPU backend for tests that read and write pools by position: each call lays the pool out and back."""

    def write_kv(
        self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv_pool_B2KPD: torch.Tensor, plan: AttentionPlan
    ) -> None:
        native = to_native(kv_pool_B2KPD, k_TKD.dtype)
        super().write_kv(k_TKD, v_TKD, native, plan)
        kv_pool_B2KPD.copy_(from_native(native, k_TKD.dtype))

    def qk_norm_rope_write(
        self,
        heads_TXD: torch.Tensor,
        norms: HeadNorms | None,
        cos_sin_SD: torch.Tensor,
        kv_pool_B2KPD: torch.Tensor,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        native = to_native(kv_pool_B2KPD, heads_TXD.dtype)
        q_TND = super().qk_norm_rope_write(heads_TXD, norms, cos_sin_SD, native, plan)
        kv_pool_B2KPD.copy_(from_native(native, heads_TXD.dtype))
        return q_TND

    def attention(
        self,
        q_TND: torch.Tensor,
        kv_pool_B2KPD: torch.Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        out_TND: torch.Tensor,
    ) -> None:
        native = to_native(kv_pool_B2KPD, q_TND.dtype)
        super().attention(q_TND, native, plan, scale=scale, out_TND=out_TND)


def rotary_table(positions: int, head_dim: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(float(positions)), torch.rand(head_dim // 2, generator=seeded(5)))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Heads of a step as one projection, and what their norms, rotation and write must leave behind."""

    step: Step
    heads_TXD: torch.Tensor
    norms: HeadNorms | None
    cos_sin_SD: torch.Tensor
    q_TND: torch.Tensor
    k_TKD: torch.Tensor
    v_TKD: torch.Tensor

    def by(self, backend: Backend, pool: torch.Tensor) -> torch.Tensor:
        return backend.qk_norm_rope_write(self.heads_TXD, self.norms, self.cos_sin_SD, pool, self.step.plan)


def placed_heads(step: Step, norms_dtype: torch.dtype | None) -> Placed:
    """Return random heads of each token of the step, padding too, and the results of the reference one by one."""
    num_heads, head_dim = step.q_TND.shape[1:]
    num_kv_heads, num_tokens = step.kv_pool_B2KPD.shape[2], len(step.plan.slot_mapping_T)
    dtype, device = step.q_TND.dtype, step.q_TND.device
    heads_TXD = normal(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, on=device)
    q_TND, k_TKD, v_TKD = heads_TXD.clone().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    norms = None
    if norms_dtype is not None:
        weights = torch.rand(2, head_dim, generator=seeded(3)).to(device, norms_dtype)
        norms = HeadNorms(q_weight_D=weights[0], k_weight_D=weights[1], eps=EPS)
        for heads, weight_D in ((q_TND, weights[0]), (k_TKD, weights[1])):
            normed = torch.empty_like(heads.flatten(0, 1))
            reference.rms_norm(heads.flatten(0, 1), weight_D, EPS, out_TH=normed)
            heads.copy_(normed.view(heads.shape))
    cos_sin_SD = rotary_table(300, head_dim).to(device)
    reference.rotary(q_TND, k_TKD, cos_sin_SD, step.plan.positions_T)
    return Placed(
        step=step,
        heads_TXD=heads_TXD,
        norms=norms,
        cos_sin_SD=cos_sin_SD,
        q_TND=q_TND,
        k_TKD=k_TKD,
        v_TKD=v_TKD,
    )
