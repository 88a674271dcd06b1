"""Identifiers of requests, sequences, blocks and tenants, each with its own type. Pure data."""

from dataclasses import dataclass
from typing import NewType

RequestId = NewType("RequestId", int)
"""A client's request inside one engine: one sequence, its `n` outputs, or its beams."""


SequenceId = NewType("SequenceId", int)


BlockId = NewType("BlockId", int)


TenantId = NewType("TenantId", int)
"""The tenant of a request, and of what is cached of it."""


BlockName = NewType("BlockName", bytes)


HostSlot = NewType("HostSlot", int)
"""One block's place in host memory."""


NOBODY = TenantId(0)
"""The tenant of all requests that name none. They share as one tenant does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedBlocks:
    """Blocks of a preempted sequence that lie in host memory."""

    first_block: int
    """Index of the first swapped block. Blocks before it were shared, and are found again by name or not at all."""
    slots: tuple[HostSlot, ...]
    num_tokens: int
    """Number of the sequence's tokens that were computed before the preemption."""
