"""Index publisher: publishes this worker's blocks to the prefix index, outside the step loop.

Owns the worker's berth (its number in the index), its lease and the batch in flight. Does not own the cache, the
arithmetic of changes (net_difference.py), the connection, or what a router makes of the index. Nothing here may raise
into the engine or make it wait. Without the index the worker keeps serving, and the difference is kept until the index
is back.

    record() -> net difference -> batches of <= 512 names, one in flight -> the index

After a lost reply the same batch is sent again, and DUPLICATE is as good as OK. After GAP or UNKNOWN the worker takes a
new berth and republishes everything, root first.

Each renewal of the lease also asks the index for some names (spot_checks.py). DAMAGED is handled like UNKNOWN.

A worker with a host cache has a berth of two numbers, and each batch holds changes of both tiers.

Every publisher also purges dead workers' entries. When the last worker dies, its entries stay until a worker comes.
Without workers no entries are added, so they are bounded by what the last workers held, and no look-up counts them.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from blockyard.proto.index.contract import (
    FIRST_SEQUENCE,
    MAX_BATCH_NAMES,
    ApplyResult,
    Batch,
    Berth,
    ErrorKind,
    PrefixIndex,
    PrefixIndexError,
    RenewResult,
    SpotCheck,
    WorkerRecord,
)
from blockyard.worker.indexing.net_difference import TieredDifference
from blockyard.worker.indexing.spot_checks import SpotChecks
from blockyard.worker.indexing.state import PublisherConfig, PublisherState

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply")


class IndexPublisher:
    """Call `record` after each step, run `run` as a task for the worker's lifetime, and `close` at its end."""

    def __init__(
        self,
        index: PrefixIndex,
        record: WorkerRecord,
        *,
        config: PublisherConfig | None = None,
        has_host_cache: bool = False,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        title: str = "the prefix index",
    ) -> None:
        """`title` names the index in log lines."""
        self._index = index
        self._title = title
        self._record = record
        self._config = config or PublisherConfig()
        self._has_host_cache = has_host_cache
        self._clock = clock
        self._rng = rng or random.Random()
        self._difference = TieredDifference()
        self._berth: Berth | None = None
        self._on_its_way: Batch | None = None
        self._applied_sequence = 0
        self._renew_at = self._purge_at = 0.0
        self._will_know_until: float | None = None
        """The time up to which the index knows all changes once the batch in flight is confirmed. None where some are
        left."""
        self._changed_at: float | None = None
        self._is_resyncing = False
        self._wants_new_berth = self._is_withdrawn = False
        self._last_error: ErrorKind | None = None
        self._num_errors = self._num_registrations = self._num_damages = 0
        self._checks, self._anywhere_checks = SpotChecks(), SpotChecks()
        self._check_at = 0.0
        self._changed, self._closing = asyncio.Event(), asyncio.Event()
        self._stopped = asyncio.Event()
        self._stopped.set()

    def record(
        self,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
        anywhere_stored: Sequence[bytes] = (),
        anywhere_removed: Sequence[bytes] = (),
    ) -> None:
        """Add a step's changes of the cache to what is to be published: removals leaf first, additions root first.

        Cheap. Call it on the event loop.
        """
        self._difference.on_gpu.record(stored, removed)
        self._difference.anywhere.record(anywhere_stored, anywhere_removed)
        self._note_age()
        self._changed.set()

    def withdraw(self) -> None:
        """Make the index hold nothing of this worker, which stays listed there with a new, empty berth."""
        self._is_withdrawn = self._wants_new_berth = True
        self._changed_at, self._is_resyncing = None, False
        self._changed.set()

    def restore(self) -> None:
        """Take `withdraw` back, and republish everything."""
        if self._is_withdrawn:
            self._is_withdrawn, self._changed_at = False, None
            self._republish()
            self._changed.set()

    def rebuild(self) -> bool:
        """Take a new berth and republish everything. Return False for a withdrawn worker, which publishes nothing."""
        if not self._is_withdrawn:
            self._wants_new_berth = self._is_resyncing = True
            self._changed.set()
        return not self._is_withdrawn

    def state(self) -> PublisherState:
        # Read each once: a thread that serves metrics may call this meanwhile.
        batch, changed_at = self._on_its_way, self._changed_at
        num_on_its_way = batch.num_names if batch is not None else 0
        state = PublisherState(
            berth=self._berth,
            num_pending=len(self._difference) + num_on_its_way,
            num_entries=len(self._difference.on_gpu.held),
            num_anywhere=len(self._difference.anywhere.held),
            lag_seconds=self._clock() - changed_at if changed_at is not None else 0.0,
            is_resyncing=self._is_resyncing,
            last_error=self._last_error,
            num_errors=self._num_errors,
            num_resyncs=max(0, self._num_registrations - 1),
            num_damages=self._num_damages,
        )
        if self._is_withdrawn:  # it publishes nothing
            return replace(
                state, num_pending=0, num_entries=0, num_anywhere=0, lag_seconds=0.0, is_resyncing=False
            )
        return state

    async def run(self) -> None:
        """Publish until `close` or a cancellation. Raises no error of the index."""
        self._stopped.clear()
        backoff_seconds = self._config.first_backoff_seconds
        try:
            while not self._closing.is_set():
                _end_if_cancelled()
                try:
                    await self._do_what_is_most_urgent()
                    backoff_seconds = self._config.first_backoff_seconds
                except PrefixIndexError as error:
                    self._note(error)
                    if error.kind is ErrorKind.DAMAGED:
                        self._damaged()
                    await self._pause(backoff_seconds * self._rng.uniform(0.5, 1.0))
                    backoff_seconds = min(2 * backoff_seconds, self._config.max_backoff_seconds)
        finally:
            self._stopped.set()

    async def close(self) -> None:
        """Stop `run` and retire the berth, so that no router sends requests here. Idempotent."""
        self._closing.set()
        self._changed.set()
        await self._stopped.wait()
        berth, self._berth = self._berth, None
        if berth is not None:
            try:
                await self._call(self._index.retire(berth))
            except PrefixIndexError as error:
                self._note(error)

    async def _do_what_is_most_urgent(self) -> None:
        now = self._clock()
        if self._berth is None or self._wants_new_berth:
            await self._register()
        elif now >= self._renew_at:
            await self._renew(self._berth)
        elif now >= self._purge_at:
            await self._purge()
        elif not self._is_withdrawn and (self._on_its_way is not None or self._difference):
            await self._publish(self._berth)
        else:
            await self._wait_for_changes()

    async def _register(self) -> None:
        if self._num_registrations and not self._is_withdrawn:
            await self._pause(self._rng.uniform(0, self._config.resync_jitter_seconds))
        lease_seconds = self._config.lease_seconds
        berth = await self._call(
            self._index.register(
                self._record, lease_seconds=lease_seconds, has_host_cache=self._has_host_cache
            )
        )
        self._berth, self._on_its_way, self._applied_sequence = berth, None, FIRST_SEQUENCE - 1
        self._wants_new_berth = False
        self._republish()
        self._num_registrations += 1
        self._renew_at = self._clock() + lease_seconds / 3
        logger.info(
            "registered in %s at berth %d, %d blocks to publish",
            self._title,
            berth.number,
            len(self._difference),
        )

    def _republish(self) -> None:
        """Mark everything as unpublished, so that it is published again: the index holds nothing under this berth."""
        self._checks.restart()
        self._anywhere_checks.restart()
        self._difference.restart(
            publishes_anywhere=self._berth is not None and self._berth.anywhere is not None
        )
        self._is_resyncing = bool(self._difference)
        self._note_age()

    async def _renew(self, berth: Berth) -> None:
        result = await self._call(
            self._index.renew(
                berth,
                lease_seconds=self._config.lease_seconds,
                applied_sequence=self._applied_sequence,
                check=self._check(),
            )
        )
        self._renew_at = self._clock() + self._config.lease_seconds / 3
        match result:
            case RenewResult.OK:
                self._answers()
            case RenewResult.FULL:
                self._note(PrefixIndexError(ErrorKind.FULL, "Redis has reached its maxmemory"))
            case RenewResult.UNKNOWN:
                self._berth = None
            case RenewResult.DAMAGED:
                self._damaged()

    def _check(self) -> SpotCheck | None:
        """Return some names that the next renewal checks.

        None where the index cannot be expected to agree, or was found damaged just now.
        """
        if self._is_withdrawn or self._on_its_way is not None or self._clock() < self._check_at:
            return None
        held, gone = self._checks.take(self._difference.on_gpu)
        anywhere_held, anywhere_gone = self._anywhere_checks.take(self._difference.anywhere)
        return SpotCheck(
            record=self._record,
            held=held,
            gone=gone,
            anywhere_held=anywhere_held,
            anywhere_gone=anywhere_gone,
        )

    def _damaged(self) -> None:
        """Republish everything after another process has written to the index, or changes were lost.

        The registration repairs what all berths need, and the purge of the old berth walks over everything.
        """
        logger.warning("%s disagrees with this worker's cache; republishing all blocks", self._title)
        self._num_damages += 1
        self._check_at = self._clock() + self._config.damage_rest_seconds
        self._berth = None

    async def _publish(self, berth: Berth) -> None:
        """Publish one batch. It stays in flight until the index has answered, whatever is recorded meanwhile."""
        if self._on_its_way is None:
            self._on_its_way = self._difference.take(MAX_BATCH_NAMES, sequence=self._applied_sequence + 1)
            self._will_know_until = None if self._difference else self._clock()
        batch, began = self._on_its_way, self._clock()
        match await self._call(self._index.apply(berth, batch)):
            case ApplyResult.OK | ApplyResult.DUPLICATE:
                self._applied_sequence = batch.sequence
                self._on_its_way = None
                self._checks.removed(batch.removed)
                self._anywhere_checks.removed(batch.anywhere_removed)
                is_full = batch.num_names >= MAX_BATCH_NAMES
                await self._after_a_batch(
                    self._config.rest_ratio * (self._clock() - began) if is_full else 0.0
                )
            case ApplyResult.GAP | ApplyResult.UNKNOWN:
                self._berth = None

    async def _after_a_batch(self, rest_seconds: float) -> None:
        """Wait before the next batch, so that changes gather."""
        if self._will_know_until is not None:
            self._is_resyncing = False
            self._changed_at = self._will_know_until if self._difference else None
        if self._difference:
            gather_seconds = self._config.flush_seconds if len(self._difference) < MAX_BATCH_NAMES else 0.0
            until_renewal = max(0.0, self._renew_at - self._clock())
            await self._pause(max(gather_seconds, min(rest_seconds, until_renewal)))

    async def _purge(self) -> None:
        progress = await self._call(self._index.purge())
        pause = self._config.purge_slice_seconds if progress.active else self._config.purge_seconds
        # Workers that started together should not all look for dead workers at the same moment.
        self._purge_at = self._clock() + pause * self._rng.uniform(0.75, 1.25)

    async def _wait_for_changes(self) -> None:
        self._changed.clear()
        until_due = min(self._renew_at, self._purge_at) - self._clock()
        try:
            async with asyncio.timeout(max(0.0, until_due)):
                await self._changed.wait()
        except TimeoutError:
            return
        await self._pause(self._config.flush_seconds)

    async def _pause(self, seconds: float) -> None:
        """Sleep until the time is over or `close` is called."""
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            return

    async def _call(self, call: Awaitable[Reply]) -> Reply:
        try:
            async with asyncio.timeout(self._config.call_timeout_seconds):
                reply = await call
        except TimeoutError as error:
            raise PrefixIndexError(ErrorKind.TIMEOUT, "no answer within the publisher's time-out") from error
        # Where memory is full, calls succeed that take none. A renewal tells when there is memory again.
        if self._last_error is not ErrorKind.FULL:
            self._answers()
        return reply

    def _answers(self) -> None:
        if self._last_error is not None:
            logger.warning("%s answers again", self._title)
        self._last_error = None

    def _note_age(self) -> None:
        if self._is_withdrawn or (not self._difference and self._on_its_way is None):
            self._changed_at, self._is_resyncing = None, False
        elif self._changed_at is None:
            self._changed_at = self._clock()

    def _note(self, error: PrefixIndexError) -> None:
        """Log one line when the index becomes unreachable, not one for each attempt."""
        self._num_errors += 1
        if self._last_error is not error.kind:
            logger.warning("%s fails; this worker serves on without it: %s", self._title, error)
        self._last_error = error.kind


def _end_if_cancelled() -> None:
    """Raise CancelledError where this task is being cancelled.

    A library that is cancelled while it cleans up under a time limit may report the time-out alone.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
