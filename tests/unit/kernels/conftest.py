"""The device of the kernel tests, and the random steps that they run on.

With CUDA the tests run natively, otherwise under Triton's interpreter. The interpreter must be chosen before the first
import of triton in the process, and transformers imports it too.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "triton was imported before tests/unit/kernels chose its interpreter: set TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"

from blockyard.kernels.attention.plan import AttentionPlan, plan_attention
from blockyard.kernels.cpu.backend import CpuBackend, from_native, to_native
from blockyard.kernels.cpu.extension import ExtensionUnavailable, load_extension
from blockyard.kernels.interface import Backend, HeadNorms
from blockyard.kernels.kv_pool import numbers_of, pool_shape, quantise, scales_of
from blockyard.kernels.selection import choose_backend

NEED_HYPOTHESIS = [
    "test_cpu_backend.py",
    "test_cpu_cascade.py",
    "test_grouped_linear.py",
    "test_int8_linear.py",
    "test_linear_choice.py",
    "test_panel_linear.py",
    "test_shared_prefix_property.py",
    "test_tiles.py",
    "test_vector_units.py",
]
"""`make gpu-check` runs on machines that have none; these are about CPUs or plain arithmetic."""
collect_ignore = [] if importlib.util.find_spec("hypothesis") else NEED_HYPOTHESIS
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A planned step, its queries, a pool with NaN in every slot beyond the contexts, an out full of NaN."""

    plan: AttentionPlan
    q_TND: torch.Tensor
    kv_pool_B2KPD: torch.Tensor
    out_TND: torch.Tensor
    scale: float


MakeStep = Callable[..., Step]


def quantised_pool(kv_pool_B2KPD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same heads in 8 bits; NaN becomes the scale of what was NaN."""
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


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", params=["triton", "torch", "cpu"])
def backend(request: pytest.FixtureRequest, device: torch.device) -> Backend:
    if request.param == "cpu":
        return request.getfixturevalue("cpu_backend")  # type: ignore[no-any-return]
    return choose_backend(device, requested=request.param)


@pytest.fixture(scope="session")
def cpu_backend(device: torch.device) -> Backend:
    if device.type != "cpu":
        pytest.skip("the CPU backend serves no CUDA tensors")
    try:
        return OnPlainPools(load_extension())
    except ExtensionUnavailable as error:
        if shutil.which("g++"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def triton_backend(device: torch.device) -> Backend:
    return choose_backend(device, requested="triton")


def in_computed_type(
    actual: torch.Tensor, expected: torch.Tensor, kv_dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results of fp16 over a pool in 8 bits as bf16: a GPU multiplies weights and values in that type."""
    if actual.dtype == torch.float16 and kv_dtype is not None:
        return actual.bfloat16(), expected.bfloat16()
    return actual, expected


@pytest.fixture
def assert_near() -> Callable[[torch.Tensor, torch.Tensor], None]:
    def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
        tolerance = TOLERANCES[actual.dtype]
        torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)

    return check


@pytest.fixture
def make_step(device: torch.device) -> MakeStep:
    def make(
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        *,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 16,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        on: torch.device = device,
        shared_blocks: Sequence[int] = (),
        **plan_options: Any,
    ) -> Step:
        """Make a random step. Row i shares its first `shared_blocks[i]` blocks with the longest row."""
        generator = torch.Generator().manual_seed(sum(context_lens))
        counts = [-(-context_len // block_size) for context_len in context_lens]
        num_blocks = sum(counts) + 3
        scattered = iter(torch.randperm(num_blocks, generator=generator).tolist())
        tables = [list(islice(scattered, count)) for count in counts]
        for table, shared in zip(tables, shared_blocks, strict=False):
            table[:shared] = max(tables, key=len)[:shared]
        pool = torch.full((num_blocks, 2, num_kv_heads, block_size, head_dim), float("nan"))
        for table, context_len in zip(tables, context_lens, strict=True):
            for position in range(context_len):
                shape = (2, num_kv_heads, head_dim)
                pool[table[position // block_size], :, :, position % block_size] = torch.randn(
                    shape, generator=generator
                )
        q_TND = torch.randn((sum(query_lens), num_heads, head_dim), generator=generator)
        plan = plan_attention(
            query_lens=query_lens,
            context_lens=context_lens,
            block_tables=tables,
            block_size=block_size,
            device=on,
            num_kv_heads=num_kv_heads,
            **plan_options,
        )
        return Step(
            plan=plan,
            q_TND=q_TND.to(on, dtype),
            kv_pool_B2KPD=pool.to(on, dtype) if kv_dtype is None else quantised_pool(pool, kv_dtype).to(on),
            out_TND=torch.full_like(q_TND, float("nan")).to(on, dtype),
            scale=head_dim**-0.5,
        )

    return make
