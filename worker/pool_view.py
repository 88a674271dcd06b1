"""A worker's block pool as messages and as text, read between two steps."""

from itertools import groupby

from blockyard.proto.v1.cluster_pb2 import Block, BlockPool, BlockRun, BlockState, WorkerLoad
from blockyard.worker.block_pool import BlockState as State
from blockyard.worker.engine import Engine, EngineLoad
from blockyard.worker.sequence import BlockId, SequenceId

MAP_WIDTH = 64
STATES = {
    State.FREE: BlockState.BLOCK_STATE_FREE,
    State.CACHED: BlockState.BLOCK_STATE_CACHED,
    State.USED: BlockState.BLOCK_STATE_USED,
}


def load_message(load: EngineLoad) -> WorkerLoad:
    return WorkerLoad(**{name: getattr(load, name) for name in EngineLoad.__dataclass_fields__})


def pool_message(engine: Engine, *, worker_id: str, incarnation: str) -> BlockPool:
    """The whole pool, run-length encoded in block order. To be called on the engine's thread."""
    pool = engine.pool
    states = ((STATES[pool.state(block)], pool.references(block)) for block in pool.blocks())
    runs = [
        BlockRun(state=state, length=sum(1 for _ in group), references=references)
        for (state, references), group in groupby(states)
    ]
    return BlockPool(
        worker_id=worker_id,
        incarnation=incarnation,
        block_size=engine.scheduler.config.block_size,
        bytes_per_block=engine.bytes_per_block,
        total_blocks=pool.num_blocks,
        free_blocks=pool.num_free,
        cached_blocks=pool.num_cached,
        used_blocks=pool.num_used,
        runs=runs,
        load=load_message(engine.load()),
    )


def block_messages(engine: Engine, start: int, count: int, request_ids: dict[SequenceId, str]) -> list[Block]:
    """Blocks `start` to `start + count`, with name and holders. To be called on the engine's thread."""
    holders: dict[BlockId, list[str]] = {}
    for sequence in engine.scheduler.running:
        for block in sequence.block_table:
            holders.setdefault(block, []).append(request_ids.get(sequence.sequence_id, ""))
    pool = engine.pool
    return [
        Block(
            block_id=block,
            state=STATES[pool.state(block)],
            references=pool.references(block),
            name=engine.cache.name(block) or b"",
            request_ids=holders.get(block, []),
        )
        for block in map(BlockId, range(start, min(start + count, pool.num_blocks)))
    ]


def symbol(run: BlockRun) -> str:
    """One character a block: `.` free, `c` cached, a digit (or `+`) for how many sequences hold it."""
    if run.state == BlockState.BLOCK_STATE_USED:
        return str(run.references) if run.references < 10 else "+"
    return "c" if run.state == BlockState.BLOCK_STATE_CACHED else "."


def map_text(pool: BlockPool) -> str:
    """The pool as lines of text, `MAP_WIDTH` blocks a line, with its counts and a legend."""
    cells = "".join(symbol(run) * run.length for run in pool.runs)
    lines = [cells[start : start + MAP_WIDTH] for start in range(0, len(cells), MAP_WIDTH)]
    load = pool.load
    head = (
        f"worker {pool.worker_id}  incarnation {pool.incarnation}\n"
        f"blocks: {pool.total_blocks} of {pool.block_size} tokens = {pool.free_blocks} free + "
        f"{pool.cached_blocks} cached + {pool.used_blocks} used\n"
        f"sequences: {load.running} running, {load.waiting} waiting\n"
        "legend: . free   c cached prefix   1-9 held by so many sequences   + by ten or more\n"
    )
    rows = "\n".join(f"{index * MAP_WIDTH:>7}  {line}" for index, line in enumerate(lines))
    return f"{head}{rows}\n"
