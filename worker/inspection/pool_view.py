"""Pool view: a worker's block pool as messages.

`take_snapshot`, `block_messages` and `blocks_found` run on the engine's thread between two steps, and copy what they
need. The rest may run on other threads, where it delays no step.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
from blockyard.proto.v1.cluster_pb2 import Block, BlockPool, BlockRun, BlockState, ResidentAdapter, WorkerLoad
from blockyard.worker.cache.block_pool import BlockState as State
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineLoad
from blockyard.worker.sequences.identifiers import BlockId, BlockName, RequestId

STATES = {
    State.FREE: BlockState.BLOCK_STATE_FREE,
    State.CACHED: BlockState.BLOCK_STATE_CACHED,
    State.USED: BlockState.BLOCK_STATE_USED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSnapshot:
    """A pool between two steps."""

    references: list[int]
    kept: bytes
    """1 for each block that the prefix cache can find."""
    block_size: int
    bytes_per_block: int
    host_cache_blocks: int
    """Blocks that host memory can keep. 0 without a host cache."""
    evictions: int
    load: EngineLoad


def load_message(load: EngineLoad) -> WorkerLoad:
    fields = {name: getattr(load, name) for name in EngineLoad.__dataclass_fields__ if name != "adapters"}
    adapters = [ResidentAdapter(**asdict(adapter)) for adapter in load.adapters or ()]
    return WorkerLoad(adapters=adapters, **fields)


def take_snapshot(engine: Engine) -> PoolSnapshot:
    """Copy the pool, in microseconds even for a large one. Call it on the engine's thread."""
    references, kept = engine.pool.snapshot()
    return PoolSnapshot(
        references=references,
        kept=kept,
        block_size=engine.scheduler.config.block_size,
        bytes_per_block=engine.bytes_per_block,
        host_cache_blocks=engine.scheduler.config.host_cache_blocks,
        evictions=engine.pool.num_evictions,
        load=engine.load(),
    )


def pool_message(snapshot: PoolSnapshot, *, worker_id: str, incarnation: str) -> BlockPool:
    """Return the message of the whole pool, with runs of equal blocks in block order."""
    load = snapshot.load
    return BlockPool(
        worker_id=worker_id,
        incarnation=incarnation,
        block_size=snapshot.block_size,
        bytes_per_block=snapshot.bytes_per_block,
        total_blocks=len(snapshot.references),
        free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks,
        used_blocks=load.used_blocks,
        host_cache_blocks=snapshot.host_cache_blocks,
        evictions=snapshot.evictions,
        runs=_runs(snapshot),
        load=load_message(load),
    )


def _runs(snapshot: PoolSnapshot) -> list[BlockRun]:
    references = np.array(snapshot.references)
    kept = np.frombuffer(snapshot.kept, dtype=np.uint8)
    # Blocks with equal keys form a run: 0 free, 1 cached, references + 1 where used.
    keys = np.where(references > 0, references + 1, kept)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(keys)) + 1))
    lengths = np.diff(np.append(starts, len(keys)))
    states = (BlockState.BLOCK_STATE_FREE, BlockState.BLOCK_STATE_CACHED, BlockState.BLOCK_STATE_USED)
    return [
        BlockRun(state=states[min(key, 2)], length=length, references=max(0, key - 1))
        for key, length in zip(keys[starts].tolist(), lengths.tolist(), strict=True)
    ]


def block_messages(
    engine: Engine, blocks: Iterable[BlockId], request_ids: Mapping[RequestId, str]
) -> list[Block]:
    """Return messages of these blocks with name and holders. Call it on the engine's thread.

    Each request appears once, however many of its outputs hold the block.
    """
    wanted = list(blocks)
    holders: dict[BlockId, dict[RequestId, None]] = {block: {} for block in wanted}
    for sequence in engine.scheduler.running:
        # The whole pool may be in use: C walks the tables, and Python visits only the blocks asked for.
        for block in holders.keys() & sequence.block_table:
            holders[block][sequence.request_id] = None
    return [
        _block_message(engine, block, [request_ids.get(key, "") for key in holders[block]])
        for block in wanted
    ]


def _block_message(engine: Engine, block: BlockId, request_ids: list[str]) -> Block:
    message = Block(
        block_id=block,
        state=STATES[engine.pool.state(block)],
        references=engine.pool.references(block),
        name=engine.cache.name(block) or b"",
        request_ids=request_ids,
    )
    lineage = engine.cache.lineage(block)
    if lineage is not None:
        message.parent = lineage.parent or b""
        message.age_seconds = max(0.0, engine.seconds_since(lineage.named_at))
    return message


def blocks_found(engine: Engine, block_ids: Iterable[int], names: Iterable[bytes]) -> list[BlockId]:
    """Return the blocks of these numbers, then those that hold these names, each once. Call it on the engine's
    thread."""
    found = dict.fromkeys(BlockId(block) for block in block_ids if 0 <= block < engine.pool.num_blocks)
    for name in names:
        found.update(dict.fromkeys(engine.cache.blocks_named(BlockName(name))))
    return list(found)
