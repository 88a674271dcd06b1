"""Identifiers of requests, sequences, blocks and tenants, as types of their own. Pure data."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    pass


RequestId = NewType("RequestId", int)
"""What a client asked for, inside one engine: one sequence, its `n` outputs, or its beams."""


SequenceId = NewType("SequenceId", int)


BlockId = NewType("BlockId", int)


TenantId = NewType("TenantId", int)
"""Whose a request is, and what is cached of it."""


BlockName = NewType("BlockName", bytes)


HostSlot = NewType("HostSlot", int)
"""A block's place in host memory."""


NOBODY = TenantId(0)
"""No tenant in particular; shares as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedBlocks:
    """What a preempted sequence had from some block on, in host memory."""

    first_block: int
    """Blocks before it were shared: they are found again by name, or not at all."""
    slots: tuple[HostSlot, ...]
    num_tokens: int
    """Tokens that were computed."""
