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
"""The tenant of requests without one. They share as one tenant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedBlocks:
    """The blocks of a preempted sequence in host memory, from `first_block` on."""

    first_block: int
    """Blocks before it were shared. They are found again by name, or not at all."""
    slots: tuple[HostSlot, ...]
    num_tokens: int
    """Tokens that were computed."""
