"""The index twin, read late: look-ups see a batch of changes only some time after its worker published it.

Stands for a slow publisher, a busy Redis and a replica that lags. Leases are never late.
"""

from collections.abc import Callable, Sequence

from blockyard.proto.index.contract import (
    MAX_LISTED,
    ApplyResult,
    Batch,
    Berth,
    Holder,
    RenewResult,
    SpotCheck,
    WorkerRecord,
)
from blockyard.proto.index.twin import TwinPrefixIndex

from simulation.index_access import answer


class LateTwin(TwinPrefixIndex):
    """Two twins: workers write to this one, and its look-ups read a copy that is `lag_seconds` behind."""

    def __init__(
        self,
        clock: Callable[[], float],
        later: Callable[[float, Callable[[], object]], None],
        lag_seconds: float,
    ) -> None:
        super().__init__(clock)
        self._later, self._lag_seconds = later, lag_seconds
        self._copy = TwinPrefixIndex(clock)
        self._copy_berths: dict[int, Berth] = {}
        """Berths in the copy, by the number of the berth that the worker knows."""

    async def register(
        self, record: WorkerRecord, *, lease_seconds: float, has_host_cache: bool = False
    ) -> Berth:
        berth = await super().register(record, lease_seconds=lease_seconds, has_host_cache=has_host_cache)
        self._copy_berths[berth.number] = await self._copy.register(
            record, lease_seconds=lease_seconds, has_host_cache=has_host_cache
        )
        return berth

    async def apply(self, berth: Berth, batch: Batch) -> ApplyResult:
        result = await super().apply(berth, batch)
        if result is ApplyResult.OK:
            copy = self._copy_berths[berth.number]
            self._later(self._lag_seconds, lambda: answer(self._copy.apply(copy, batch)))
        return result

    async def renew(
        self,
        berth: Berth,
        *,
        lease_seconds: float,
        applied_sequence: int = 0,
        check: SpotCheck | None = None,
    ) -> RenewResult:
        await self._copy.renew(self._copy_berths[berth.number], lease_seconds=lease_seconds)
        return await super().renew(
            berth, lease_seconds=lease_seconds, applied_sequence=applied_sequence, check=check
        )

    async def lookup(
        self, names: Sequence[bytes], *, most: int = MAX_LISTED, expects_workers: bool = False
    ) -> Sequence[Holder]:
        return await self._copy.lookup(names, most=most, expects_workers=expects_workers)
