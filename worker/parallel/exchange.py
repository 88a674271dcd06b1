"""Exchange: the way in which ranks exchange tensors, by the device that they compute on.

Owns the choice, and what a rank needs to meet the others: a name of shared memory, or a file.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from blockyard.kernels.cpu.extension import ExtensionUnavailable, load_extension
from blockyard.kernels.cpu.group import RankGroup, RankLost
from blockyard.kernels.cpu.library import CpuLibrary
from blockyard.worker.config import EngineConfig
from blockyard.worker.parallel.collective import Collective, RankFailed, RanksLost
from blockyard.worker.parallel.torch_collective import TorchCollective


class SharedMemoryCollective(RankGroup):
    """Implements `Collective` for ranks that are processes of one machine."""

    def check(self) -> None:
        try:
            super().check()
        except RankLost as error:
            raise (RanksLost if self.is_aborted else RankFailed)(str(error)) from error


class Exchange:
    """How one rank meets the others: in shared memory on a CPU, by NCCL and a file on GPUs."""

    def __init__(
        self,
        config: EngineConfig,
        library: CpuLibrary | None,
        *,
        rank: int,
        size: int,
        meeting: str | None = None,
    ) -> None:
        """The ranks other than 0 give rank 0's `meeting`. Raises OSError where that is on another machine."""
        self.rank, self.size = rank, size
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._group: SharedMemoryCollective | None = None
        if is_on_cpu(config):
            assert library is not None
            self._group = SharedMemoryCollective(lambda: library, rank=rank, size=size, name=meeting)
            self.meeting = self._group.memory.name
        else:
            if meeting is None:
                self._folder = tempfile.TemporaryDirectory(prefix="blockyard-ranks-")
                meeting = f"{self._folder.name}/meeting"
            self.meeting = meeting
            os.stat(Path(meeting).parent)

    def meet(self, *, on_failure: Callable[[str], object]) -> Collective:
        """Return the collective, once all ranks do the same."""
        if self._group is not None:
            return self._group
        file = Path(self.meeting)
        return TorchCollective(
            "nccl", rank=self.rank, size=self.size, meeting_file=file, on_failure=on_failure
        )

    def unlink(self) -> None:
        """Remove the name of the shared memory, which all ranks have mapped."""
        if self._group is not None:
            self._group.memory.unlink()

    def end(self) -> None:
        """End all waits of all ranks, where that is possible. NCCL's end with the process."""
        if self._group is not None:
            self._group.abort()
        if self._folder is not None:
            self._folder.cleanup()


def is_on_cpu(config: EngineConfig) -> bool:
    return config.engine == "simulated" or config.device == "cpu" or not torch.cuda.is_available()


def kernels_for(config: EngineConfig) -> CpuLibrary | None:
    """Return the C++ kernels. Where ranks on GPUs have none, their steps take the connections. Raises ValueError."""
    try:
        return load_extension()
    except ExtensionUnavailable as error:
        if is_on_cpu(config):
            raise ValueError(
                f"ranks on a CPU need the C++ kernels, which are unavailable: {error}"
            ) from error
        return None
