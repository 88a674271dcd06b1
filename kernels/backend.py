"""The interface every kernel backend has, and the one place that chooses a backend.

Shapes: T tokens in the step, N query heads, K kv heads, D head size, P tokens a block, B blocks in the pool,
H hidden size, I input (or intermediate) size, O output size, S positions in the rotary table, C block copies.
"""

import logging
import os
from typing import Literal, Protocol

import torch
from blockyard.kernels.attention_plan import AttentionPlan

logger = logging.getLogger(__name__)

BackendName = Literal["auto", "torch", "triton"]


class Backend(Protocol):
    """Operations of one decoder step. `out_*` tensors are written, never read."""

    @property
    def name(self) -> str:
        """torch or triton."""
        ...

    def write_kv(
        self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv_pool_B2KPD: torch.Tensor, plan: AttentionPlan
    ) -> None:
        """Store keys and values at the plan's slots; padding slots are skipped."""
        ...

    def attention(
        self,
        q_TND: torch.Tensor,
        kv_pool_B2KPD: torch.Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        out_TND: torch.Tensor,
    ) -> None:
        """Causal attention of all rows of the plan, within its window if it has one, over the pool, after this
        step's `write_kv`."""
        ...

    def rms_norm(
        self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float, *, out_TH: torch.Tensor
    ) -> None:
        """Normalise the last dimension in fp32. `out_TH` may be `x_TH`."""
        ...

    def add_rms_norm(
        self,
        x_TH: torch.Tensor,
        residual_TH: torch.Tensor,
        weight_H: torch.Tensor,
        eps: float,
        *,
        out_TH: torch.Tensor,
    ) -> None:
        """residual += x in place, then out = norm(residual). `out_TH` may be `x_TH`."""
        ...

    def rotary(
        self, q_TND: torch.Tensor, k_TKD: torch.Tensor, cos_sin_SD: torch.Tensor, positions_T: torch.Tensor
    ) -> None:
        """Rotate halves in place; `cos_sin_SD` is fp32, its first D/2 columns cosines, the others sines."""
        ...

    def silu_mul(self, gate_up_T2I: torch.Tensor, *, out_TI: torch.Tensor) -> None:
        """out = silu(first half) * second half."""
        ...

    def copy_blocks(self, kv_pool_B2KPD: torch.Tensor, src_dst_C2: torch.Tensor) -> None:
        """Copy whole blocks; destinations are distinct and none is also a source."""
        ...

    def pack_linear(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """The weight as this backend's `linear` likes it best: itself, or a copy that only `linear` can read.

        Who owns the weight and has no other use for it should let it go, or it is in memory twice.
        """
        ...

    def linear(
        self, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x @ weight^T + bias, for a weight as it is or from `pack_linear`."""
        ...


def choose_backend(
    device: torch.device, *, requested: BackendName = "auto", deterministic: bool = False
) -> Backend:
    """Triton wherever CUDA is, torch elsewhere, unless asked otherwise. ValueError for what cannot be had."""
    if deterministic and (device.type != "cpu" or requested == "triton"):
        raise ValueError(
            f"deterministic mode needs the torch backend on a CPU, got backend {requested!r} on {device}"
        )
    if requested == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"the triton backend on {device} needs TRITON_INTERPRET=1; use backend 'torch' there"
        )
    backend, reason = _build(device, requested, deterministic)
    logger.info("kernel backend %s on %s: %s", backend.name, device, reason)
    return backend


def _build(device: torch.device, requested: BackendName, deterministic: bool) -> tuple[Backend, str]:
    # Imported here so that a CPU worker never loads triton.
    if deterministic:
        from blockyard.kernels.deterministic_backend import DeterministicTorchBackend

        return DeterministicTorchBackend(), "deterministic mode"
    if requested == "triton" or (requested == "auto" and device.type == "cuda"):
        from blockyard.kernels.triton_backend import TritonBackend

        return TritonBackend(), "asked for" if requested == "triton" else "CUDA is there"
    from blockyard.kernels.torch_backend import TorchBackend

    return TorchBackend(), "asked for" if requested == "torch" else "no CUDA here"
