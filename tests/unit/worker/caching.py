"""A pool and its prefix cache, with requests that come, hold their blocks and go."""

from collections.abc import Sequence
from dataclasses import dataclass

from blockyard.worker.cache.block_pool import BlockPool
from blockyard.worker.cache.pauses import bucket_of
from blockyard.worker.cache.prefix_cache import PrefixCache
from blockyard.worker.sequences.identifiers import NOBODY, BlockId, BlockName, TenantId


@dataclass(slots=True, kw_only=True)
class Served:
    """A request that runs."""

    blocks: list[BlockId]
    num_found: int


class Cache:
    """A pool with a prefix cache."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool)
        self.pool.now_seconds = 1.0

    def start(
        self,
        names: Sequence[BlockName],
        tenant: TenantId = NOBODY,
        *,
        most_found: int | None = None,
        num_generated: int = 0,
    ) -> Served:
        """Take the blocks of a request that looks for its first `most_found` names."""
        num_prompt = len(names) - num_generated
        found = self.cache.match(names[: num_prompt if most_found is None else most_found])
        self.pool.share(found)
        blocks = found + self.pool.allocate(len(names) - len(found))
        for index in range(len(found), len(names)):
            parent = names[index - 1] if index else None
            is_generated = index >= num_prompt
            self.cache.assign(blocks[index], names[index], tenant, parent=parent, is_generated=is_generated)
        self.cache.confirm_all(blocks)
        return Served(blocks=blocks, num_found=len(found))

    def end(self, blocks: list[BlockId], pause: float = 0.0) -> None:
        """Release a request's blocks. Its session says that it comes back after the pause."""
        bucket = bucket_of(self.pool.now_seconds + pause) if pause else 0
        self.pool.release(blocks, bucket=bucket, first_alone=self.cache.first_alone(blocks))

    def serve(
        self,
        names: Sequence[BlockName],
        pause: float = 0.0,
        tenant: TenantId = NOBODY,
        *,
        num_generated: int = 0,
    ) -> int:
        """Serve one request, and return how many blocks it found."""
        served = self.start(names, tenant, num_generated=num_generated)
        self.end(served.blocks, pause)
        return served.num_found

    def check(self) -> None:
        """Check that no child outlives its parent, and more."""
        self.pool.check_invariants()
        self.cache.check_invariants()
        for block in self.pool.blocks():
            lineage = self.cache.lineage(block)
            assert lineage is None or lineage.parent is None or self.cache.blocks_named(lineage.parent)


def named(*parts: object) -> list[BlockName]:
    """Return the names of a chain of blocks, each with the content that its part stands for."""
    return [BlockName(str(parts[: end + 1]).encode()) for end in range(len(parts))]
