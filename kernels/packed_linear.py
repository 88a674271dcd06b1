"""Linear layers through oneDNN's packed weights, where this build of PyTorch has them; F.linear everywhere
else.

Packing lays a weight out once for the CPU's vector units. Measured on 2 cores with AVX-512: fp32 1.8x, bf16
1.25-1.45x the speed of F.linear. It costs a second copy of the weight in memory. Must never import triton.

Shapes: T tokens, I input size, O output size.
"""

import torch
import torch.nn.functional as F

# Below this the call overhead of the packed operation eats its gain.
MIN_PACKED_NUMEL = 1 << 16
_PACKED_DTYPES = (torch.float32, torch.bfloat16)

_WeightKey = tuple[int, torch.Size, torch.dtype]


class PackedLinears:
    """Packs each weight at its first use. Weights must not change after that."""

    def __init__(self) -> None:
        # The dense weight is kept beside the packed one: while it lives no other weight can have its address.
        self._packed: dict[_WeightKey, tuple[torch.Tensor, torch.Tensor]] = {}
        self._available = _is_available()

    def __call__(
        self, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        if not self._fits(x_TI, weight_OI):
            return F.linear(x_TI, weight_OI, bias_O)
        packed = self._pack(weight_OI)
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, packed, bias_O, "none", [], "")
        return result

    def _fits(self, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
        return (
            self._available
            and weight_OI.device.type == "cpu"
            and weight_OI.dtype in _PACKED_DTYPES
            and weight_OI.dtype == x_TI.dtype
            and weight_OI.numel() >= MIN_PACKED_NUMEL
            and weight_OI.is_contiguous()
            and x_TI.numel() > 0
        )

    def _pack(self, weight_OI: torch.Tensor) -> torch.Tensor:
        key = (weight_OI.data_ptr(), weight_OI.shape, weight_OI.dtype)
        entry = self._packed.get(key)
        if entry is None:
            dense = weight_OI.detach()
            entry = (dense, torch.ops.mkldnn._reorder_linear_weight(dense))
            self._packed[key] = entry
        return entry[1]


def _is_available() -> bool:
    """The operations are private to PyTorch: try them on a small weight rather than trust a version."""
    weight_OI = torch.eye(64)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI)
        result = torch.ops.mkldnn._linear_pointwise(weight_OI, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.equal(result, weight_OI)
