"""A worker as a process: its second SIGTERM, what its command loads, and strangers on its machine."""

import asyncio
import os
import re
import signal
import sys

from tests.unit.worker.pulling import a_worker
from tests.unit.worker.serving import KV_BYTES, SECRET, Session, engine_settings


async def test_a_second_sigterm_ends_it_at_once() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "blockyard.worker", "--model", engine_settings().model),
        *("--engine", "simulated", "--simulated-step-seconds", "0.02", "--grace-seconds", "600"),
        *("--kv-cache-memory", str(KV_BYTES)),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "BLOCKYARD_CLUSTER_SECRET": SECRET},
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            while (match := re.search(rb"serves at (\S+)", await process.stderr.readline())) is None:
                pass
            async with Session(match[1].decode()) as session:
                await session.submit(1, max_tokens=450)
                await session.until_runs()
                process.send_signal(signal.SIGTERM)
                await session.read_until("draining")
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == -signal.SIGTERM
    finally:
        if process.returncode is None:
            process.kill()


async def output_of(program: str, *arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, *arguments, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    return printed.decode()


async def test_the_command_sets_how_openmp_spins_before_it_loads_torch() -> None:
    program = "import sys, blockyard.worker.__main__, blockyard.worker.llm; print('torch' in sys.modules)"
    assert await output_of(program) == "False\n"


STRANGER = """
import ctypes, os, socket, sys
if os.getuid():
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
else:
    os.setgid(65534)
    os.setuid(65534)
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect(bytes.fromhex(sys.argv[1]))
    assert not sock.recv(1)
"""


async def test_a_process_that_the_worker_may_not_inspect_is_no_neighbour() -> None:
    """Root may inspect what hides, but the process then has another account."""
    async with a_worker("w0") as worker:
        _, near = worker._exchange._lender._listeners
        assert await output_of(STRANGER, near.getsockname().hex()) == "", "it was not turned away"
