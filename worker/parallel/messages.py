"""Messages: the arrays of a step as one run of int32, as rank 0 sends it. Pure.

A message begins with its version and the shape of each array, in the order of StepArrays' fields. An array of one
dimension has -1 as its second size. The arrays follow.
"""

from dataclasses import fields
from math import prod

import numpy as np
import numpy.typing as npt
from blockyard.worker.parallel.step_arrays import StepArrays

VERSION = 2
_FIELDS = {field.name: getattr(StepArrays(), field.name).ndim for field in fields(StepArrays)}
"""Dimensions of each array, by its name."""
_HEADER_WORDS = 1 + 2 * len(_FIELDS)


def pack(arrays: StepArrays) -> npt.NDArray[np.int32]:
    """Return the message of a step."""
    parts = [getattr(arrays, name) for name in _FIELDS]
    message = np.empty(_HEADER_WORDS + sum(part.size for part in parts), dtype=np.int32)
    message[:_HEADER_WORDS] = -1
    message[0] = VERSION
    end = _HEADER_WORDS
    for index, part in enumerate(parts):
        message[1 + 2 * index : 1 + 2 * index + part.ndim] = part.shape
        start, end = end, end + part.size
        message[start:end].reshape(part.shape)[...] = part
    return message


def unpack(message: bytes | bytearray) -> StepArrays:
    """Return the arrays of a message, without copying them. Raises ValueError for anything else."""
    if len(message) % 4 or len(message) < 4 * _HEADER_WORDS:
        raise ValueError(f"{len(message)} bytes are no message of a step")
    words = np.frombuffer(message, dtype=np.int32)
    version, *sizes = words[:_HEADER_WORDS].tolist()
    arrays, end = {}, _HEADER_WORDS
    for index, (name, num_dimensions) in enumerate(_FIELDS.items()):
        shape = sizes[2 * index : 2 * index + num_dimensions]
        if min(shape) < 0:
            raise ValueError(f"a message of a step with an array of shape {shape}")
        start, end = end, end + prod(shape)
        if end > len(words):
            break
        arrays[name] = words[start:end].reshape(shape)
    if version != VERSION or end != len(words):
        raise ValueError("the sizes in a message of a step do not fit it")
    return StepArrays(**arrays)
