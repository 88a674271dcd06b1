"""Where the kernel tests run, and the random steps they run on.

Natively where there is CUDA, else under Triton's interpreter. The interpreter has to be chosen before triton
is first imported anywhere in the process, and transformers imports it too.
"""

import os
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
            "triton was imported before tests/kernels chose its interpreter: set TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"

from blockyard.kernels.attention_plan import AttentionPlan, plan_attention
from blockyard.kernels.backend import Backend, choose_backend

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


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", params=["triton", "torch"])
def backend(request: pytest.FixtureRequest, device: torch.device) -> Backend:
    return choose_backend(device, requested=request.param)


@pytest.fixture(scope="session")
def triton_backend(device: torch.device) -> Backend:
    return choose_backend(device, requested="triton")


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
        on: torch.device = device,
        **plan_options: Any,
    ) -> Step:
        generator = torch.Generator().manual_seed(sum(context_lens))
        counts = [-(-context_len // block_size) for context_len in context_lens]
        num_blocks = sum(counts) + 3
        scattered = iter(torch.randperm(num_blocks, generator=generator).tolist())
        tables = [list(islice(scattered, count)) for count in counts]
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
            kv_pool_B2KPD=pool.to(on, dtype),
            out_TND=torch.full_like(q_TND, float("nan")).to(on, dtype),
            scale=head_dim**-0.5,
        )

    return make
