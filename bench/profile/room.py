"""Decodes whose keys and values fit the memory, and the pool for them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.engine.build import BLOCK_SIZE
from bench.profile.decoding import blocks_of_decodes

GIB = 2**30
STEP_BYTES = 4 * GIB
"""Memory of a GPU that is kept free for steps and their graphs, beside weights and pool."""


@dataclass(frozen=True, slots=True, order=True)
class Decode:
    """Steady decodes: a context length, and a number of sequences."""

    context: int
    running: int

    def __str__(self) -> str:
        return f"{self.running} sequences of {self.context:,} tokens"

    def num_blocks(self, num_steps: int) -> int:
        return blocks_of_decodes(
            running=self.running, context=self.context, num_steps=num_steps, block_size=BLOCK_SIZE
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Pool of a profile, and the decodes that it holds."""

    num_blocks: int
    fitting: tuple[Decode, ...]
    left_out: tuple[Decode, ...]


def room_for(
    decodes: Sequence[Decode], *, num_steps: int, wanted_blocks: int, max_blocks: int | None
) -> Room:
    """Make the pool as large as wanted or as the largest decodes need, but not larger than `max_blocks`, if given."""
    needed = {decode: decode.num_blocks(num_steps) for decode in decodes}
    fitting = tuple(decode for decode in decodes if max_blocks is None or needed[decode] <= max_blocks)
    num_blocks = max([wanted_blocks, *(needed[decode] for decode in fitting)])
    return Room(
        num_blocks=num_blocks if max_blocks is None else min(num_blocks, max_blocks),
        fitting=fitting,
        left_out=tuple(decode for decode in decodes if decode not in fitting),
    )
