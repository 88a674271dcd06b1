"""Processes of the ranks of this machine: starts those but rank 0, each with its GPU and its share of the threads."""

import logging
import os
import subprocess
import sys

import torch
from blockyard.worker.config import EngineConfig

logger = logging.getLogger(__name__)
SECRET_VARIABLE = "BLOCKYARD_CLUSTER_SECRET"


class RankProcesses:
    """The processes that rank 0 has started. They end with this one."""

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self, config: EngineConfig, *, leader_address: str, secret: str, cluster: str) -> None:
        """Start one for each other rank. Threads of the machine are divided among all ranks, this one too."""
        size = config.tensor_parallel_size
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, torch.get_num_threads() // size))
        torch.set_num_threads(int(threads))
        for rank in range(1, size):
            environment = os.environ | {SECRET_VARIABLE: secret, "OMP_NUM_THREADS": threads}
            if config.device != "cpu":
                environment["CUDA_VISIBLE_DEVICES"] = _visible_device(rank)
            command = [sys.executable, "-m", "blockyard.worker.ranks", str(rank), leader_address, cluster]
            child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
            self._children.append(child)
            logger.info("rank %d is process %d", rank, child.pid)

    def check_all_run(self) -> None:
        """Raise ValueError where one has ended."""
        for child in self._children:
            if (status := child.poll()) is not None:
                raise ValueError(f"a rank's process ended with {status} before it came")

    def kill(self) -> None:
        for child in self._children:
            child.kill()  # A frozen one would otherwise stay.

    def wait(self) -> None:
        for child in self._children:
            child.wait()


def _visible_device(rank: int) -> str:
    """Return the GPU of a rank on this machine, as CUDA_VISIBLE_DEVICES names it."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return visible[rank] if rank < len(visible) else str(rank)
