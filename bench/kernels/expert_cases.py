"""Cases of a layer's experts: the call, its bytes and its FLOPs. Owns the sizes of well-known mixtures.

Bytes are those of the experts that at least one token chooses, read once, and of inputs and outputs. Experts in full
precision are measured in turns with those in 4 and 8 bits that the backend has kernels for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from blockyard.kernels.torch.experts import choose_experts

from bench.kernels.case import Bench, Case
from bench.kernels.linear_cases import GROUP, INT4, QUANTISED_TOKENS, random_weight, weight_bytes

FORMS = {"triton": (INT4, "int8", "fp8 in blocks"), "cpu": (INT4, "int8")}
"""Weights of experts by backend, as in linear_cases.py."""


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


def experts(bench: Bench, shape: ExpertShape, tokens: int) -> Iterator[Case]:
    """Yield the experts of a layer, and in turns with them those with quantised weights."""
    plain = _experts(bench, shape, tokens)
    is_whole = shape.inner % GROUP == 0 and shape.hidden % GROUP == 0
    forms = FORMS.get(bench.backend.name, ()) if is_whole and tokens in QUANTISED_TOKENS else ()
    turns = f"{shape.model} experts {tokens}" if forms else ""
    yield replace(plain, turns=turns)
    for form in forms:
        yield replace(_quantised(bench, plain, shape, tokens, form), turns=turns)


def _quantised(bench: Bench, plain: Case, shape: ExpertShape, tokens: int, form: str) -> Case:
    """Return the case of the same experts with weights of this form."""
    backend, logits_TE = bench.backend, _logits(shape, tokens)
    sizes = ((2 * shape.inner, shape.hidden), (shape.hidden, shape.inner))

    def make() -> Callable[[], object]:
        gate_up, down = (
            backend.pack_experts([random_weight(bench, form, *size) for _ in range(shape.experts)])
            for size in sizes
        )
        x, logits = bench.random(tokens, shape.hidden), logits_TE.to(bench.device, bench.dtype)
        return lambda: backend.experts(x, logits, gate_up, down, top_k=shape.top_k, normalizes=True)

    of_expert = sum(weight_bytes(form, *size) for size in sizes)
    item = bench.dtype.itemsize
    return replace(
        plain,
        kernel=f"{plain.kernel}, {form}",
        num_bytes=_num_chosen(shape, tokens) * of_expert + 2 * tokens * shape.hidden * item,
        resident_bytes=3 * shape.experts * of_expert,
        make=make,
    )


def _logits(shape: ExpertShape, tokens: int) -> torch.Tensor:
    return torch.randn(tokens, shape.experts, generator=torch.Generator().manual_seed(tokens))


def _num_chosen(shape: ExpertShape, tokens: int) -> int:
    """Return the number of experts that at least one token chooses."""
    chosen_TK, _ = choose_experts(_logits(shape, tokens), shape.top_k, normalizes=True)
    return len(chosen_TK.unique())


def _experts(bench: Bench, shape: ExpertShape, tokens: int) -> Case:
    item = bench.dtype.itemsize
    logits_TE = _logits(shape, tokens)
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
        num_bytes=(_num_chosen(shape, tokens) * of_expert + 2 * tokens * shape.hidden) * item,
        flops=2 * tokens * shape.top_k * of_expert,
        resident_bytes=2 * shape.experts * of_expert * item,
        make=make,
    )
