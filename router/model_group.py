"""Model group: one of the models that a router serves, with its parts and the addresses of its workers.

Owns where the addresses come from: the config, the supervisor (`set_workers`) or the model's index. The index counts
only without a supervisor, and only its records that workers have signed with the cluster secret. Owns the calls that
use the group now. Does not own its parts (composition.py), or how long it lives (model_groups.py).
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from blockyard.proto.index.contract import PrefixIndex, PrefixIndexError
from blockyard.router.cluster.directory import Directory
from blockyard.router.config import RouterConfig, ServedModel
from blockyard.router.generation.generation import RouterParts

logger = logging.getLogger(__name__)

DIRECTORY_SECONDS = 1.0
"""Interval and timeout of reading the index's directory of workers."""
MAX_DISCOVERED_WORKERS = 1024
"""Most workers found through Redis. A link takes memory and keeps trying to connect, even to a dead address."""
PAGES_A_LOOK = 4
"""Pages of 256 records, as many as the most discovered workers.

Forged records for all 65,535 berths take 64 rounds, and about 40 ms of each second.
"""


class ModelGroup:
    """One served model. `run` keeps its workers, and ends when it is cancelled."""

    def __init__(
        self, model: ServedModel, parts: RouterParts, shards: Sequence[PrefixIndex], config: RouterConfig
    ) -> None:
        """`shards` are the model's index on each of its servers."""
        self.model = model
        self.parts = parts
        self._shards = shards
        self._config = config
        # An address in the config says no model, so it is the first one's.
        self._configured = config.workers if model == config.models[0] else ()
        self._supervised: tuple[str, ...] = ()
        self._listed: dict[PrefixIndex, frozenset[str]] = {}
        """Addresses of the workers that each server of the index lists."""
        self._forged: dict[PrefixIndex, int] = {}
        self._num_calls = 0
        self.is_idle = asyncio.Event()
        """Set while no call uses the group."""
        self.is_idle.set()
        self._tell_fleet()

    @property
    def num_ready_workers(self) -> int:
        return len(self.parts.fleet.view.ready())

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Count one call that uses the group, for the life of the context."""
        self._num_calls += 1
        self.is_idle.clear()
        try:
            yield
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self.is_idle.set()

    def set_workers(self, addresses: Sequence[str]) -> None:
        """Set the supervisor's list of addresses "host:port". The config's and discovered workers stay."""
        self._supervised = tuple(addresses)
        self._tell_fleet()

    async def run(self) -> None:
        """Connect to the workers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.parts.fleet.run())
            tasks.create_task(self.parts.adapters.follow())
            if self._config.discovers_workers:
                for index in self._shards:
                    tasks.create_task(self._follow_directory(index))

    async def _follow_directory(self, index: PrefixIndex) -> None:
        """Tell the fleet the addresses of workers with signed records in the index on one server, PAGES_A_LOOK pages at
        a time. A worker that one of several servers lists is known.

        A record of an ended worker may still be there, or be written back. No other process can pass for that worker
        (tls.py).
        """
        directory = Directory(
            secret=self._config.cluster_secret,
            cluster=self._config.cluster,
            max_addresses=MAX_DISCOVERED_WORKERS,
            has_failed=self.parts.fleet.has_failed,
        )
        task = asyncio.current_task()
        # A cancellation at the moment of a time-out may be lost in the Redis client, but the task still counts it.
        while task is not None and not task.cancelling():
            try:
                async with asyncio.timeout(DIRECTORY_SECONDS):
                    for _ in range(PAGES_A_LOOK):
                        directory.take(await index.directory_page(directory.next_after))
                        if directory.next_after == 0:
                            break
            except (PrefixIndexError, TimeoutError):
                logger.debug("the index returned no list of workers")
            self._note_forged(index, directory.num_forged)
            self._listed[index] = directory.addresses
            self._tell_fleet()
            await asyncio.sleep(DIRECTORY_SECONDS)

    def _note_forged(self, index: PrefixIndex, number: int) -> None:
        if number and not self._forged.get(index):
            logger.error("%d records of workers in Redis are not signed by this cluster: ignored", number)
        self._forged[index] = number

    def _tell_fleet(self) -> None:
        listed = (address for addresses in self._listed.values() for address in addresses)
        self.parts.fleet.set_addresses({*self._configured, *self._supervised, *listed})
