"""Workers' true caches for the property tests: small forests of blocks, always prefix-closed."""

import itertools
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256

Path = tuple[int, ...]
"""A block is the path of branches that leads to it; its prefixes are its ancestors."""

MAX_DEPTH = 9
ALL_CHAINS: list[Path] = [
    (*start, *itertools.repeat(0, MAX_DEPTH - 3)) for start in itertools.product(range(2), repeat=3)
]


@cache
def name_of(path: Path) -> bytes:
    return sha256(repr(path).encode()).digest()[:16]


@dataclass(slots=True, kw_only=True)
class Cache:
    """Stored blocks. Insertion order is the order in which they were stored."""

    paths: dict[Path, None] = field(default_factory=dict)

    def store(self, chain: Path) -> list[Path]:
        """Root first; those already there are not stored again."""
        new = [chain[:depth] for depth in range(1, len(chain) + 1) if chain[:depth] not in self.paths]
        self.paths.update(dict.fromkeys(new))
        return new

    def evict(self, num_blocks: int, chooser: random.Random) -> list[Path]:
        """Leaves only, one after the other."""
        evicted = []
        for _ in range(min(num_blocks, len(self.paths))):
            parents = {path[:-1] for path in self.paths}
            leaf = chooser.choice([path for path in self.paths if path not in parents])
            del self.paths[leaf]
            evicted.append(leaf)
        return evicted


def seeded_change(cache: Cache, seed: int) -> list[tuple[list[Path], list[Path]]]:
    """A few engine steps: (stored, evicted) of each, as an engine reports them."""
    chooser = random.Random(seed)
    steps = []
    for _ in range(chooser.randint(1, 3)):
        evicted = cache.evict(chooser.randint(0, 6), chooser) if chooser.random() < 0.6 else []
        chain = chooser.choice(ALL_CHAINS)[: chooser.randint(0, MAX_DEPTH)]
        steps.append((cache.store(chain), evicted))
    return steps


def brute_force(caches: Mapping[tuple[str, str], Iterable[Path]], chain: Path) -> dict[tuple[str, str], int]:
    """How many leading blocks of `chain` each holds, where it holds any."""
    depths = {}
    for owner, stored in caches.items():
        held = set(stored)
        depth = next((d for d in range(len(chain)) if chain[: d + 1] not in held), len(chain))
        if depth:
            depths[owner] = depth
    return depths
