"""Block kinds: what two workers must have in common before one may use the other's KV blocks.

A block's name stands for tokens, so workers of unequal kinds share names, and serve together. They exchange no blocks.
Owns the comparison and its words. Workers make the kinds (worker/memory/block_kinds.py).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # A bare machine with a GPU has no protobuf, and computes with kinds all the same.
    from blockyard.proto.v1.session_pb2 import Hello


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """The kind of a worker's blocks, as words `key=value`."""

    layout: str
    """Words on how the bytes of a block lie."""
    arithmetic: str
    """Words on what decides the values that a block holds for given tokens, down to their rounding."""

    @classmethod
    def of(cls, hello: "Hello") -> "BlockKind":
        return cls(layout=hello.kv_layout, arithmetic=hello.kv_arithmetic)

    @property
    def is_known(self) -> bool:
        """Return whether the worker has said both. A worker of an older version has not, and is unlike any other."""
        return bool(self.layout and self.arithmetic)

    def exchanges_with(self, other: "BlockKind") -> bool:
        """Return whether a block of one may stand for a block of the other."""
        return self.is_known and self == other

    def __str__(self) -> str:
        return f"{self.layout} {self.arithmetic}"


def difference(first: str, second: str) -> str:
    """Return in words where two texts of words `key=value` differ, such as "kernels is cpu, not torch".

    The first text is that of the worker of which the words speak.
    """
    here, there = _words(first), _words(second)
    if not here or not there:
        return "one of the two is of an older version, which does not say what its blocks are"
    differing = [key for key in here | there if here.get(key) != there.get(key)]
    return ", ".join(f"{key} is {here.get(key, 'none')}, not {there.get(key, 'none')}" for key in differing)


def _words(text: str) -> dict[str, str]:
    return {key: value for key, sign, value in (word.partition("=") for word in text.split()) if sign}
