"""Instructions that a device has, and what kernels ask of their tensors. Imports no triton."""

from functools import cache

import torch


@cache
def converts_e4m3(device: torch.device) -> bool:
    """Return whether the device has instructions that convert e4m3: NVIDIA's GPUs from compute capability 8.9 on."""
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (8, 9)


def check_dense_rows(*tensors: torch.Tensor) -> None:
    assert all(tensor.stride(-1) == 1 for tensor in tensors), [tensor.stride() for tensor in tensors]
