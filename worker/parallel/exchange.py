"""Exchange: the way in which ranks exchange steps and tensors, by where they are and what they compute on.

Ranks on one machine share memory: a ring for steps, and on CPUs buffers for sums. Others take their connections for
steps, and gloo over TCP for sums. Sums on GPUs are NCCL's in both cases. Owns the choice, and the shared memory.
"""

from collections.abc import Callable

import torch
from blockyard.kernels.cpu.extension import ExtensionUnavailable, load_extension
from blockyard.kernels.cpu.group import MessageRing, RankGroup, RankLost
from blockyard.kernels.cpu.library import CpuLibrary
from blockyard.worker.config import EngineConfig
from blockyard.worker.parallel.collective import Collective, RankFailed, RanksLost
from blockyard.worker.parallel.link_store import LinkStore
from blockyard.worker.parallel.torch_collective import GlooCollective, TorchCollective, gloo_group, nccl_group

Names = list[str | None]
"""Names of shared memory: of the ring, and of the buffers for sums."""


class SharedMemoryCollective(RankGroup):
    """Implements `Collective` for ranks that are processes of one machine."""

    def check(self) -> None:
        try:
            super().check()
        except RankLost as error:
            raise (RanksLost if self.is_aborted else RankFailed)(str(error)) from error


class Exchange:
    """How one rank meets the others. Any thread may call `end`."""

    def __init__(
        self,
        config: EngineConfig,
        library: CpuLibrary | None,
        *,
        rank: int,
        size: int,
        tell: Callable[[str, bytes], object],
    ) -> None:
        """`tell` gives a value to all other ranks, where it goes to the `store`."""
        self.rank, self.size = rank, size
        self.store = LinkStore(tell)
        """The values that ranks tell each other while they meet by torch."""
        self.ring: MessageRing | None = None
        """None: steps take the connections."""
        self._library = library
        self._is_on_cpu = is_on_cpu(config)
        self._group: SharedMemoryCollective | None = None
        self._gloo: GlooCollective | None = None

    def make_memory(self) -> Names:
        """Make the shared memory, as rank 0, and return its names. Raises OSError."""
        self._map([None, None])
        return [None if part is None else part.memory.name for part in (self.ring, self._group)]

    def map_memory(self, names: Names) -> bool:
        """Map what rank 0 has made. Return False where that is on another machine, or one of both lacks the kernels."""
        if any(names) != (self._library is not None):
            return False
        try:
            self._map(names)
        except OSError:
            return False
        return True

    def _map(self, names: Names) -> None:
        library, rank, size = self._library, self.rank, self.size
        if library is not None:
            self.ring = MessageRing(lambda: library, rank=rank, size=size, name=names[0])
            if self._is_on_cpu:
                self._group = SharedMemoryCollective(lambda: library, rank=rank, size=size, name=names[1])

    def unlink_memory(self) -> None:
        """Remove the names. Those who have mapped the memory keep it."""
        for part in (self.ring, self._group):
            if part is not None:
                part.memory.unlink()

    def leave_memory(self) -> None:
        """Do without shared memory. All ranks call this where one of them is on another machine."""
        self.ring = self._group = None

    def meet(self, *, host: str, on_failure: Callable[[str], object]) -> Collective:
        """Return the collective, once all ranks do the same. `host` is this rank's address for the others."""
        if self._group is not None:
            return self._group
        rank, size = self.rank, self.size
        try:
            if not self._is_on_cpu:
                group = nccl_group(self.store, rank, size)
                return TorchCollective(group, rank=rank, size=size, on_failure=on_failure)
            group = gloo_group(self.store, rank, size, host)
        except (RuntimeError, TimeoutError) as error:
            raise RanksLost(f"the ranks do not meet: {error}") from error
        self._gloo = GlooCollective(group, rank=rank, size=size, on_failure=on_failure)
        return self._gloo

    def end(self) -> None:
        """End all waits of all ranks, where that is possible. Those in NCCL end with the process."""
        self.store.close()
        if self._gloo is not None:
            self._gloo.end()
        for part in (self.ring, self._group):
            if part is not None:
                part.abort()


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
