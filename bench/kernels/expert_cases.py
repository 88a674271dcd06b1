"""Cases of a layer's experts: the call, its bytes and its FLOPs. Owns the sizes of well-known mixtures.

Bytes are those of the experts that at least one token chooses, read once, and of inputs and outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from blockyard.kernels.torch.experts import choose_experts

from bench.kernels.case import Bench, Case


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Sizes of one sparse layer."""

    model: str
    hidden: int
    inner: int
    experts: int
    top_k: int


QWEN3_30B_A3B = ExpertShape(model="qwen3-30b-a3b", hidden=2048, inner=768, experts=128, top_k=8)
MIXTRAL_8X7B = ExpertShape(model="mixtral-8x7b", hidden=4096, inner=14336, experts=8, top_k=2)
HALF_AS_WIDE = ExpertShape(model="qwen3-30b-a3b / 2", hidden=1024, inner=384, experts=128, top_k=8)
"""Half of Qwen3-30B-A3B's width, for the memory of a small machine."""


def experts(bench: Bench, shape: ExpertShape, tokens: int) -> Case:
    item = bench.dtype.itemsize
    logits_TE = torch.randn(tokens, shape.experts, generator=torch.Generator().manual_seed(tokens))
    chosen_TK, _ = choose_experts(logits_TE, shape.top_k, normalizes=True)
    of_expert = 3 * shape.hidden * shape.inner

    def make() -> Callable[[], object]:
        gate_up = bench.backend.pack_experts(bench.random(shape.experts, 2 * shape.inner, shape.hidden))
        down = bench.backend.pack_experts(bench.random(shape.experts, shape.hidden, shape.inner))
        x, logits = bench.random(tokens, shape.hidden), logits_TE.to(bench.device, bench.dtype)
        return lambda: bench.backend.experts(x, logits, gate_up, down, top_k=shape.top_k, normalizes=True)

    return Case(
        kernel="experts",
        model=shape.model,
        shape=f"{tokens} tokens",
        num_bytes=(len(chosen_TK.unique()) * of_expert + 2 * tokens * shape.hidden) * item,
        flops=2 * tokens * shape.top_k * of_expert,
        resident_bytes=2 * shape.experts * of_expert * item,
        make=make,
    )
