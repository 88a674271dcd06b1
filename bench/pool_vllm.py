"""Replays a recorded trace on vLLM's BlockPool. bench/pool.py runs it with the Python of an environment with vLLM.

Imports nothing from Blockyard. Reads the trace (JSON) from the first line of stdin. Each further line asks for one
replay, and the answer is one line of JSON on stdout.
"""

import gc
import json
import sys
import time
from types import SimpleNamespace

from vllm import __version__
from vllm.v1.core.block_pool import BlockPool


def replay(trace: dict, block_size: int) -> dict:
    # Add one block, because vLLM reserves one.
    pool = BlockPool(trace["num_blocks"] + 1, enable_caching=True, hash_block_size=block_size)
    requests = [
        SimpleNamespace(block_hashes=[bytes.fromhex(name) for name in names]) for names in trace["names"]
    ]
    operations = [tuple(operation) for operation in trace["operations"]]
    tables = [[] for _ in requests]
    found, mismatches, groups = [], 0, [0]
    gc.collect()
    gc.disable()
    started = time.process_time_ns()
    for kind, number, first, last in operations:
        if kind == "allocate":
            tables[number].extend(pool.get_new_blocks(first))
        elif kind == "name":
            pool.cache_full_blocks(requests[number], tables[number], first, last, block_size, 0)
        elif kind == "match":
            found = []
            for name in requests[number].block_hashes[:first]:
                blocks = pool.get_cached_block(name, groups)
                if blocks is None:
                    break
                found.append(blocks[0])
        elif kind == "share":
            mismatches += len(found) != first
            pool.touch(found[:first])
            # Its policy may have evicted what ours kept.
            tables[number] = found[:first] + pool.get_new_blocks(max(0, first - len(found)))
        elif kind == "release":
            pool.free_blocks(reversed(tables[number]))
            tables[number] = []
        else:
            pool.take_events()
    nanoseconds = time.process_time_ns() - started
    gc.enable()
    return {"nanoseconds": nanoseconds, "mismatches": mismatches, "version": __version__}


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr
    trace = json.loads(sys.stdin.readline())
    for line in sys.stdin:
        if line.strip() == "go":
            print(json.dumps(replay(trace, trace["block_size"])), file=answers, flush=True)


if __name__ == "__main__":
    main()
