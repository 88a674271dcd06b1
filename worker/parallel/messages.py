"""Messages: the arrays of a step as one run of int32, as rank 0 sends it. Pure.

A message begins with its version and the shape of each array, in the order of StepArrays' fields. An array of one
dimension has -1 as its second size. The arrays follow.
"""

from dataclasses import fields

import numpy as np
import numpy.typing as npt
from blockyard.worker.parallel.step_arrays import StepArrays

VERSION = 1
_FIELDS = {field.name: getattr(StepArrays(), field.name).ndim for field in fields(StepArrays)}
"""Dimensions of each array, by its name."""
_HEADER_WORDS = 1 + 2 * len(_FIELDS)


def pack(arrays: StepArrays) -> npt.NDArray[np.int32]:
    """Return the message of a step."""
    parts = [getattr(arrays, name) for name in _FIELDS]
    header = np.full(_HEADER_WORDS, -1, dtype=np.int32)
    header[0] = VERSION
    for index, part in enumerate(parts):
        header[1 + 2 * index : 1 + 2 * index + part.ndim] = part.shape
    return np.concatenate([header, *(part.ravel() for part in parts)], dtype=np.int32, casting="unsafe")


def unpack(message: bytes | bytearray) -> StepArrays:
    """Return the arrays of a message, without copying them. Raises ValueError for anything else."""
    if len(message) % 4 or len(message) < 4 * _HEADER_WORDS:
        raise ValueError(f"{len(message)} bytes are no message of a step")
    words = np.frombuffer(message, dtype=np.int32)
    sizes = words[1:_HEADER_WORDS].reshape(-1, 2)
    shapes = [
        tuple(size[:num_dimensions])
        for size, num_dimensions in zip(sizes.tolist(), _FIELDS.values(), strict=True)
    ]
    ends = np.cumsum([_HEADER_WORDS, *(int(np.prod(shape, dtype=np.int64)) for shape in shapes)])
    if words[0] != VERSION or min(map(min, shapes)) < 0 or ends[-1] != len(words):
        raise ValueError("the sizes in a message of a step do not fit it")
    starts = ends[:-1].tolist()
    return StepArrays(
        **{
            name: words[start:end].reshape(shape)
            for name, shape, start, end in zip(_FIELDS, shapes, starts, ends[1:].tolist(), strict=True)
        }
    )
