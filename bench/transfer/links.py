"""`python -m bench.transfer.links MODEL FOLDER REPEATS RATE...`: what pulls report of links of known rates, as JSON.

Runs in a network namespace of its own, as root there. The source is in another one, at the far end of a pair of virtual
interfaces. The kernel (tbf) limits the source's side to each rate in turn, in Mbit/s.
"""

import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from secrets import token_hex
from typing import Any

from bench.transfer.rig import Worker
from bench.transfer.speed import BLOCKS, block_bytes, options, prompt_of

NEAR, FAR = "10.78.0.1", "10.78.0.2"
OURS, THEIRS = "near1", "far1"
ISOLATED = ("unshare", "--user", "--map-root-user", "--net")
COME_UP = f"""
until ip link set {THEIRS} up 2>/dev/null; do sleep 0.02; done
ip link set lo up && ip address add {FAR}/24 dev {THEIRS} && exec "$@"
"""
PULL_SECONDS = 4.0
"""About how long a pull takes: fewer blocks where the link is slower."""
MAX_SECONDS = 60.0


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


def join(far_pid: int) -> None:
    """Give the far end of the link to the source, once it is in its own namespace."""
    own = Path("/proc/self/ns/net").readlink()
    while Path(f"/proc/{far_pid}/ns/net").readlink() == own:
        time.sleep(0.02)
    run(f"ip link add {OURS} type veth peer name {THEIRS}")
    run(f"ip link set {THEIRS} netns {far_pid}")
    run(f"ip address add {NEAR}/24 dev {OURS}")
    run(f"ip link set {OURS} up")


def limit(far_pid: int, mbits: int) -> None:
    """Limit both ends. The burst is what a clock of 250 Hz needs."""
    burst = max(16, mbits * 1000 // 8 // 250)
    tbf = f"root tbf rate {mbits}mbit burst {burst}kb latency 100ms"
    run(f"tc qdisc replace dev {OURS} {tbf}")
    run(f"nsenter --net=/proc/{far_pid}/ns/net tc qdisc replace dev {THEIRS} {tbf}")


async def measure(model: str, folder: Path, repeats: int, rates: list[int]) -> list[dict[str, Any]]:
    run("ip link set lo up")
    settings = options(model, folder)
    secret = token_hex(32)
    source = Worker("source", settings, secret=secret, folder=folder, host=FAR)
    destination = Worker("dest", settings, secret=secret, folder=folder, host="127.0.0.1")
    found = []
    try:
        far_pid = source.spawn(("unshare", "--net", "sh", "-c", COME_UP, "sh"))
        join(far_pid)
        destination.spawn()
        async with source.session(), destination.session():
            prompt = prompt_of(random.Random(3))
            await source.ask(prompt, 1)
            for mbits in rates:
                limit(far_pid, mbits)
                wanted = round(PULL_SECONDS * mbits * 1e6 / 8 / block_bytes(model))
                found.append(
                    await _one_rate(source, destination, prompt, min(wanted, BLOCKS), mbits, repeats)
                )
    finally:
        for worker in (source, destination):
            worker.end()
    return found


async def _one_rate(
    source: Worker, destination: Worker, prompt: list[int], blocks: int, mbits: int, repeats: int
) -> dict[str, Any]:
    reports = []
    for _ in range(repeats):
        length = blocks * 16 + 8
        answer = await destination.ask(prompt[:length], 1, pull=source.order(blocks, MAX_SECONDS))
        assert answer.report is not None
        assert answer.report.num_blocks == blocks, answer.report
        reports.append(answer.report)
        await destination.flush()
    rates = [8e-6 * report.num_bytes / report.transfer_seconds for report in reports]
    return {
        "configured_mbits": mbits,
        "megabytes": round(reports[0].num_bytes / 1e6, 1),
        "mbits": round(statistics.median(rates), 1),
        "all_mbits": [round(rate, 1) for rate in rates],
        "setup_ms": [round(1000 * report.setup_seconds, 2) for report in reports],
        "ratio": round(statistics.median(rates) / mbits, 3),
    }


if __name__ == "__main__":
    MODEL, FOLDER, REPEATS, *RATES = sys.argv[1:]
    print(json.dumps(asyncio.run(measure(MODEL, Path(FOLDER), int(REPEATS), list(map(int, RATES))))))
