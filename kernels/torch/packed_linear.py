"""Linear layers through oneDNN's packed weights, where this build of PyTorch has them; F.linear everywhere
else.

Packing lays a weight out once for the CPU's vector units. Measured on 2 cores with AVX-512: fp32 1.8x, bf16
1.25-1.45x the speed of F.linear. A packed weight is a tensor that only `packed_linear` can read, and a copy: the
owner of the dense one lets that go, weight by weight, and so holds no more than one twice. A tied head stays
twice, dense as the embedding and packed as the head. Must never import triton.

Shapes: T tokens, I input size, O output size.
"""

import torch
import torch.nn.functional as F

# Below this the call overhead of the packed operation eats its gain.
MIN_PACKED_NUMEL = 1 << 16
_PACKED_DTYPES = (torch.float32, torch.bfloat16)


def pack(weight_OI: torch.Tensor) -> torch.Tensor:
    """A packed copy; the weight itself where packing gains nothing. Only for a data type that `can_pack`."""
    if weight_OI.device.type == "cpu" and weight_OI.numel() >= MIN_PACKED_NUMEL and weight_OI.is_contiguous():
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach())
        return packed
    return weight_OI


def packed_linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """x @ weight^T + bias, for a weight that is packed or not."""
    if not weight_OI.is_mkldnn:
        return F.linear(x_TI, weight_OI, bias_O)
    if not x_TI.shape[0]:
        return x_TI.new_empty(0, len(weight_OI))
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, bias_O, "none", [], "")
    return result


def can_pack(dtype: torch.dtype) -> bool:
    """The operations are private to PyTorch, and those for bf16 want more of a CPU than F.linear does: try them on a
    small weight rather than trust a version."""
    if dtype not in _PACKED_DTYPES:
        return False
    weight_OI = torch.eye(64, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI)
        result = torch.ops.mkldnn._linear_pointwise(weight_OI, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return bool(packed.is_mkldnn) and torch.equal(result, weight_OI)
