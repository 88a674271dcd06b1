"""Workers' true caches for the property tests: small forests of blocks, always prefix-closed."""

import itertools
import random
from collections.abc import Container, Iterable, Mapping
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
    return sha256(f"path {path}".encode()).digest()[:16]


@dataclass(slots=True, kw_only=True)
class Cache:
    """Stored blocks. Insertion order is the order in which they were stored."""

    paths: dict[Path, None] = field(default_factory=dict)

    def store(self, chain: Path) -> list[Path]:
        """Root first; those already there are not stored again."""
        new = [chain[:depth] for depth in range(1, len(chain) + 1) if chain[:depth] not in self.paths]
        self.paths.update(dict.fromkeys(new))
        return new

    def evict(self, num_blocks: int, chooser: random.Random, *, keep: Container[Path] = ()) -> list[Path]:
        """Leaves only, one after the other; none of `keep`."""
        evicted = []
        for _ in range(min(num_blocks, len(self.paths))):
            parents = {path[:-1] for path in self.paths}
            leaves = [path for path in self.paths if path not in parents and path not in keep]
            if not leaves:
                break
            leaf = chooser.choice(leaves)
            del self.paths[leaf]
            evicted.append(leaf)
        return evicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Report of an engine about one step."""

    stored: list[Path]
    evicted: list[Path]
    anywhere_stored: list[Path]
    anywhere_evicted: list[Path]

    @property
    def names(self) -> tuple[list[bytes], list[bytes], list[bytes], list[bytes]]:
        """Return the names in the form that a publisher takes."""
        paths = (self.stored, self.evicted, self.anywhere_stored, self.anywhere_evicted)
        stored, evicted, anywhere_stored, anywhere_evicted = (
            [name_of(path) for path in part] for part in paths
        )
        return stored, evicted, anywhere_stored, anywhere_evicted


@dataclass(slots=True, kw_only=True)
class Tiers:
    """A worker's truth. What is in `anywhere` and not on the GPU is in host memory; without a host cache nothing is."""

    has_host_cache: bool
    on_gpu: Cache = field(default_factory=Cache)
    anywhere: Cache = field(default_factory=Cache)

    def step(self, chooser: random.Random) -> Step:
        evicted = self.on_gpu.evict(chooser.randint(0, 6), chooser) if chooser.random() < 0.6 else []
        chain = chooser.choice(ALL_CHAINS)[: chooser.randint(0, MAX_DEPTH)]
        stored = self.on_gpu.store(chain)
        if not self.has_host_cache:
            return Step(stored=stored, evicted=evicted, anywhere_stored=[], anywhere_evicted=[])
        anywhere_stored = self.anywhere.store(chain)
        num_lost = chooser.randint(0, 6) if chooser.random() < 0.4 else 0
        return Step(
            stored=stored,
            evicted=evicted,
            anywhere_stored=anywhere_stored,
            anywhere_evicted=self.anywhere.evict(num_lost, chooser, keep=self.on_gpu.paths),
        )

    def seeded_change(self, seed: int) -> list[Step]:
        """A few engine steps."""
        chooser = random.Random(seed)
        return [self.step(chooser) for _ in range(chooser.randint(1, 3))]


def brute_force(caches: Mapping[tuple[str, str], Iterable[Path]], chain: Path) -> dict[tuple[str, str], int]:
    """How many leading blocks of `chain` each holds, where it holds any."""
    depths = {}
    for owner, stored in caches.items():
        held = set(stored)
        depth = next((d for d in range(len(chain)) if chain[: d + 1] not in held), len(chain))
        if depth:
            depths[owner] = depth
    return depths
