"""Embedding: the one result of a request that wants no tokens, in the size that the client asks for. Pure."""

import numpy as np
import numpy.typing as npt
from blockyard.proto.naming.pooling import Pooling
from blockyard.router.generation.client_buffer import Delta, Run

Embedding = npt.NDArray[np.float32]
LEAST_LENGTH = 1e-12
"""A shorter embedding is not brought to length 1, as in sentence-transformers."""


async def only_delta(run: Run) -> Delta:
    """Run a request for an embedding, and return its one delta, which has it. Raises what `run` raises."""
    deltas: list[Delta] = []
    await run(deltas.append)
    (delta,) = deltas
    return delta


def sized(packed: bytes, dimensions: int | None, pooling: Pooling) -> Embedding:
    """Return the first `dimensions` numbers of an embedding, at length 1 again if the model normalises. None: all."""
    whole = np.frombuffer(packed, "<f4")
    if dimensions is None or dimensions >= len(whole):
        return whole
    first = whole[:dimensions]
    if not pooling.normalizes:
        return first
    length = max(float(np.linalg.norm(first.astype(np.float64))), LEAST_LENGTH)
    return (first / length).astype(np.float32)
