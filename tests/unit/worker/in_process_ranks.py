"""Ranks as threads of one process, which exchange tensors under a condition. No rank waits without a deadline."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from threading import Condition

import torch
from blockyard.worker.parallel.collective import RankFailed

DEADLINE_SECONDS = 30.0


class InProcess:
    """Implements `Collective` for one thread of several. Make them with `in_process`."""

    def __init__(self, rank: int, size: int, meeting: "_Meeting") -> None:
        self.rank = rank
        self.size = size
        self._meeting = meeting
        self._number = 0
        self._num_operations = 0

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        self._number, self._num_operations = number, 0
        try:
            yield
        except BaseException:
            self._meeting.fail(number)
            raise

    def all_reduce(self, x: torch.Tensor) -> None:
        x.copy_(reduce(torch.add, self._exchange(x)))

    def gather(self, x_SV: torch.Tensor) -> torch.Tensor | None:
        parts = self._exchange(x_SV)
        return torch.cat(parts, dim=-1) if self.rank == 0 else None

    def broadcast(self, x: torch.Tensor) -> None:
        x.copy_(self._exchange(x)[0])

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in their order."""
        self._num_operations += 1
        return self._meeting.exchange((self._number, self._num_operations), self.rank, x.clone())


def in_process(size: int, *, deadline_seconds: float = DEADLINE_SECONDS) -> list[InProcess]:
    """Return the places of `size` threads. An operation raises RankFailed where one does not come in time."""
    meeting = _Meeting(size, deadline_seconds)
    return [InProcess(rank, size, meeting) for rank in range(size)]


class _Meeting:
    """Tensors that ranks have brought, by step and operation."""

    def __init__(self, size: int, deadline_seconds: float) -> None:
        self._size = size
        self._deadline_seconds = deadline_seconds
        self._changed = Condition()
        self._brought: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        self._failed = -1
        """The last step in which a rank has failed."""

    def fail(self, number: int) -> None:
        with self._changed:
            self._failed = max(self._failed, number)
            self._changed.notify_all()

    def exchange(self, key: tuple[int, int], rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        with self._changed:
            # An operation is over where a rank begins the next but one: all have read it.
            for old in [old for old in self._brought if old < (key[0], key[1] - 1)]:
                del self._brought[old]
            brought = self._brought.setdefault(key, {})
            brought[rank] = x
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: len(brought) == self._size or self._failed >= key[0], self._deadline_seconds
            )
            if len(brought) == self._size:
                return [brought[other] for other in range(self._size)]
            missing = sorted(set(range(self._size)) - set(brought))
            reason = "another rank has failed" if self._failed >= key[0] else "the deadline has passed"
            raise RankFailed(f"step {key[0]}, operation {key[1]}: {reason} ({missing} were not there)")
