"""`python -m tests.nightly.worker.far_rank`, within a network namespace of its own: two ranks that share no memory.

Rank 1 is at the far end of a pair of virtual interfaces, in a namespace and with a /dev/shm of its own, as on another
machine. Prints as JSON the tokens, and after how many seconds each end noticed that the link went down.
"""

import json
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from blockyard.worker import ranks
from blockyard.worker.config import EngineConfig
from blockyard.worker.llm import LLM
from blockyard.worker.parallel.collective import RanksLost
from blockyard.worker.parallel.processes import SECRET_VARIABLE
from blockyard.worker.sequences.sampling_params import SamplingParams

from tests.unit.worker.rank_links import DEMO, GREEDY, PROMPTS, SECRET, settings

NEAR, FAR = "10.78.0.1", "10.78.0.2"
OURS, THEIRS = "near0", "far0"
COME_UP = f"""
mount -t tmpfs none /dev/shm
until ip link set {THEIRS} up 2>/dev/null; do sleep 0.02; done
ip link set lo up && ip address add {FAR}/24 dev {THEIRS} && exec "$@"
"""
CUT_AFTER_SECONDS = 1.0
END_SECONDS = 60.0


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


class FarLeader(ranks.RankLeader):
    """Starts rank 1 at the far end."""

    far: "subprocess.Popen[bytes]"
    reason: str

    def __init__(self, config: EngineConfig, **_: Any) -> None:
        super().__init__(config, secret=SECRET, cluster="far", host=NEAR)
        self.on_lost = partial(setattr, FarLeader, "reason")

    def spawn(self) -> None:
        command = [sys.executable, "-m", "blockyard.worker.ranks", "1", self.address, self.cluster]
        FarLeader.far = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", COME_UP, "sh", *command],
            env=os.environ | {SECRET_VARIABLE: SECRET, "OMP_NUM_THREADS": "1"},
        )
        own = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{self.far.pid}/ns/net").readlink() == own:
            time.sleep(0.02)
        run(f"ip link set {THEIRS} netns {self.far.pid}")


def main() -> None:
    run("ip link set lo up")
    run(f"ip link add {OURS} type veth peer name {THEIRS}")
    run(f"ip address add {NEAR}/24 dev {OURS}")
    run(f"ip link set {OURS} up")
    ranks.RankLeader = FarLeader  # type: ignore[misc]
    llm = LLM(str(DEMO), **settings(tensor_parallel_size=2))
    tokens = [list(answer.token_ids) for answer in llm.generate(PROMPTS, GREEDY)]
    cut_at: list[float] = []

    def cut() -> None:
        run(f"ip link set {OURS} down")
        cut_at.append(time.monotonic())

    threading.Timer(CUT_AFTER_SECONDS, cut).start()
    try:
        while True:
            llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=100), ignore_eos=True)
    except RanksLost:
        noticed = time.monotonic() - cut_at[0]
    FarLeader.far.wait(END_SECONDS)
    ended = time.monotonic() - cut_at[0]
    told = {"tokens": tokens, "noticed": noticed, "far_ended": ended, "reason": FarLeader.reason}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)
