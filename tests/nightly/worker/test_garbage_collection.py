"""Python's garbage collector ignores the objects of a loaded model, and tracks few objects of served requests.

A long collection would delay every stream.
"""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.worker.scheduling import make_scheduler, make_sequence, step

MODEL = Path(__file__).parents[3] / "deploy" / "demo_model" / "checkpoint"
SERVING = f"""
import asyncio, gc, os, signal
from blockyard.worker.__main__ import parse, serve

async def main():
    options = ["--model", {str(MODEL)!r}, "--device", "cpu", "--kv-cache-memory", str(18 << 20)]
    serving = asyncio.create_task(serve(parse([*options, "--metrics-port", "-1", "--grace-seconds", "0"])))
    async with asyncio.timeout(120):
        while not gc.get_freeze_count() and not serving.done():
            await asyncio.sleep(0.05)
    loaded = gc.get_freeze_count()
    watched = len(gc.get_objects())
    os.kill(os.getpid(), signal.SIGTERM)
    print(loaded, watched, await serving, gc.get_freeze_count())

asyncio.run(main())
"""
"""A worker process as its command runs it, and a look at its collector from within."""


def test_a_worker_that_serves_has_all_that_it_loaded_out_of_the_collectors_reach(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVING],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    loaded, watched, exit_code, still_frozen = map(int, done.stdout.split())
    assert loaded > 100_000
    assert watched < loaded / 10
    assert (exit_code, still_frozen) == (0, 0)


def walked_while_decoding(num_blocks: int) -> int:
    """Return the references that a full collection follows in a pool of 256 blocks, `num_blocks` of them filled."""
    scheduler = make_scheduler(num_blocks=256, max_num_batched_tokens=4096)
    scheduler.submit(make_sequence(0, [token % 50 for token in range(num_blocks * 16)]))
    step(scheduler)
    step(scheduler)
    assert sum(scheduler.cache.name(block) is not None for block in scheduler.pool.blocks()) == num_blocks
    gc.collect()  # it forgets then what can be in no cycle
    return sum(len(gc.get_referents(each)) for each in gc.get_objects())


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="it walks dicts of plain values too")
def test_the_collector_walks_a_name_and_a_number_of_each_block_and_no_token() -> None:
    # The least of three: what other tests have left running here makes objects too.
    grown = min(walked_while_decoding(210) - walked_while_decoding(10) for _ in range(3))
    assert grown < 200 * 2, "each has left the list of free blocks too"
