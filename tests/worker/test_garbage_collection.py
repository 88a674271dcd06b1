"""Python's garbage collector leaves alone what a worker has loaded: a walk over it would hold every stream up."""

import subprocess
import sys
from pathlib import Path

MODEL = Path(__file__).parents[2] / "deploy" / "demo_model" / "checkpoint"
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
