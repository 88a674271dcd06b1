"""Runner: carries out the batches of a folder, in the router that owns the folder.

Each line runs as a call over HTTP would, under the name of the batch's creator and with the lowest priority. A line
that is answered is in one of the batch's two answer files, so a router that was killed goes on where it was. Owns the
stages of a batch. Does not own how many lines run at once (lane.py), the format (lines.py) or the disk (store.py).
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar

from blockyard.router.admission.disk_turns import DiskTurns
from blockyard.router.calls.generating import Calls
from blockyard.router.openai.batches.answer_file import Answers
from blockyard.router.openai.batches.lane import Lane
from blockyard.router.openai.batches.line_calls import LineCall, LineCalls
from blockyard.router.openai.batches.lines import (
    LINE_BYTES,
    BadLine,
    Line,
    num_inputs,
    parse_line,
    unanswered_line,
)
from blockyard.router.openai.batches.records import BatchRecord, FileRecord, LineError, Status
from blockyard.router.openai.batches.room import LimitPassed
from blockyard.router.openai.batches.store import Store, TenantStore
from blockyard.router.openai.http.body import max_body_bytes, max_values

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Time after which a batch that another router has taken, or a cancellation there, is noticed."""
RETRY_SECONDS = 5.0
"""Pause before a batch that the disk has failed goes on."""
SYNC_SECONDS = 1.0
READ_BYTES = 2**20
MAX_LINES = 50_000
MAX_INPUTS = 50_000
"""Most embeddings of a batch, over all its lines, as in OpenAI's API."""
MAX_ERRORS = 100
CHECKS_A_TICK = 8
"""Lines that are checked in one tick of the event loop before a batch runs."""
CHECK_PAUSE_SECONDS = 0.002
UNANSWERED: Mapping[Status, tuple[str, str]] = {
    "expired": ("batch_expired", "the batch's time was over before this request was answered"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
}
"""Code and message for each line that has no answer at the end of its batch."""
NUM_THREADS = 4
FOLDER = "@folder"
"""Stands for a tenant in the turns of what is done for all tenants. No tenant has such a name."""
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class _Job:
    """A batch that this router carries out."""

    record: BatchRecord
    store: TenantStore
    stops: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client has cancelled the batch, or there is no room for its answers."""
    no_room: LimitPassed | None = None


class Runner:
    def __init__(self, store: Store, calls: Calls, line_calls: LineCalls) -> None:
        self._store, self._calls, self._line_calls = store, calls, line_calls
        # Of the model and not of the workers, so that a line which was checked is never too long later.
        most_tokens = calls.groups.longest_context
        self._most_bytes = max_body_bytes(most_tokens) + LINE_BYTES
        self._most_values = max_values(most_tokens)
        self._lane = Lane(calls)
        # Of its own: calls of clients may fill theirs.
        self._turns = DiskTurns(NUM_THREADS)
        self._jobs: dict[str, _Job] = {}
        self._checking = asyncio.Lock()
        self._changed = asyncio.Event()

    def look(self) -> None:
        """Look for new batches and cancellations at once."""
        self._changed.set()

    async def run(self) -> None:
        """Carry out batches, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    try:
                        await self._begin_new(tasks)
                    except OSError as error:
                        logger.error("the folder of batches cannot be read: %s", error.strerror)
                    await _within(self._changed, POLL_SECONDS)
                    self._changed.clear()
        finally:
            self._store.release()

    async def _begin_new(self, tasks: asyncio.TaskGroup) -> None:
        if self._calls.groups.registry.is_draining or not await self._run(FOLDER, self._store.become_owner):
            return
        for record in await self._run(FOLDER, self._store.unfinished):
            job = self._jobs.get(record.id)
            if job is None:
                store = self._store.of(record.owner.tenant)
                # The list may be older than the end of the batch, which must not run again.
                latest = await self._run(FOLDER, store.batch, record.id)
                if latest is None or latest.has_ended:
                    continue
                job = self._jobs[record.id] = _Job(latest, store)
                tasks.create_task(self._carry_out(job))
            if await self._run(FOLDER, job.store.is_cancelled, record.id):
                job.stops.set()

    async def _carry_out(self, job: _Job) -> None:
        """Bring a batch to its end, however often the disk fails meanwhile."""
        try:
            while not job.record.has_ended:
                try:
                    await self._go_on(job)
                except* OSError:
                    logger.error("batch %s waits for the disk", job.record.id)
                    await asyncio.sleep(RETRY_SECONDS)
        except Exception as error:
            # The text of the exception may quote a line.
            logger.error("batch %s has failed: %s", job.record.id, _names(error))
            try:
                # The answers so far are worth having.
                await self._of(job, _publish, job.record, job.store)
                failure = LineError(code="internal", message="the router has failed on this batch")
                await self._save(
                    job, replace(job.record, status="failed", failed_at=_now(), errors=(failure,))
                )
            except OSError as unsaved:
                logger.error("the failure of batch %s is not saved: %s", job.record.id, _names(unsaved))
        finally:
            del self._jobs[job.record.id]

    async def _go_on(self, job: _Job) -> None:
        if job.record.status == "validating":
            async with self._checking:
                await self._check(job)
        if job.record.status == "in_progress":
            while self._waits_for_another(job) and job.record.expires_at > time.time():
                await _within(job.stops, POLL_SECONDS)
            await self._answer_all(job)
        if job.record.status == "finalizing":
            await self._end(job)

    def _waits_for_another(self, job: _Job) -> bool:
        """Return whether an earlier batch of the tenant must end first. A cancelled batch waits for none."""
        record = job.record
        return not job.stops.is_set() and any(
            other.record.owner.tenant == record.owner.tenant
            and (other.record.created_at, other.record.id) < (record.created_at, record.id)
            for other in self._jobs.values()
        )

    async def _of(self, job: _Job, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work of a batch in a thread, after earlier work of its tenant."""
        return await self._run(job.record.owner.tenant, work, *args, **kwargs)

    async def _run(self, tenant: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.wrap_future(self._turns.submit(tenant, work, *args, **kwargs))

    async def _save(self, job: _Job, record: BatchRecord) -> None:
        await self._of(job, job.store.save, record)
        job.record = record

    # Checking

    async def _check(self, job: _Job) -> None:
        """Check the form of all lines before the first one runs. A batch with a line that is no request fails."""
        errors: list[LineError] = []
        seen: set[str] = set()
        num_lines = num_embeddings = 0
        async for number, raw in self._lines(job):
            num_lines += 1
            try:
                line = self._parsed(job, raw)
                if line.custom_id in seen:
                    raise BadLine("duplicate_custom_id", "an earlier line has this custom_id", "custom_id")
                seen.add(line.custom_id)
                num_embeddings += num_inputs(line.body) if job.record.endpoint == "/v1/embeddings" else 0
            except BadLine as error:
                errors.append(error.at(number))
            if len(errors) >= MAX_ERRORS or num_lines > MAX_LINES or num_embeddings > MAX_INPUTS:
                break
            if num_lines % CHECKS_A_TICK == 0:
                await asyncio.sleep(CHECK_PAUSE_SECONDS)
        if num_lines > MAX_LINES:
            errors = [LineError(code="too_many_lines", message=f"a batch has at most {MAX_LINES} lines")]
        elif num_embeddings > MAX_INPUTS:
            errors = [LineError(code="too_many_inputs", message=f"a batch has at most {MAX_INPUTS} inputs")]
        elif not num_lines:
            errors = [LineError(code="empty_file", message="the file has no line")]
        if errors:
            failed = replace(job.record, status="failed", failed_at=_now(), errors=tuple(errors))
            await self._save(job, failed)
        else:
            begun = replace(job.record, status="in_progress", in_progress_at=_now(), total=num_lines)
            await self._save(job, begun)

    def _parsed(self, job: _Job, raw: bytes) -> Line:
        """Return the request of a line. Raises BadLine."""
        if len(raw) > self._most_bytes:
            raise BadLine("line_too_long", f"a line has at most {self._most_bytes} bytes")
        return parse_line(raw, endpoint=job.record.endpoint, most_values=self._most_values)

    async def _lines(self, job: _Job) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the lines of the input with their numbers, without blank ones. A line that is far too long is cut."""
        path = job.store.path(job.record.input_file_id)
        if not await self._of(job, path.exists):
            raise LookupError("the input file is gone")
        number = 0
        with await self._of(job, _opened, path) as file:
            while pieces := await self._of(job, _whole_lines, file, self._most_bytes + 1):
                for raw in pieces:
                    number += 1
                    if raw.strip():
                        yield number, raw

    # Answering

    async def _answer_all(self, job: _Job) -> None:
        """Send each line that has no answer yet, and write the answers.

        The batch ends earlier if it is cancelled or expires, or if there is no room for its answers.
        """
        record = job.record
        paths = job.store.path(record.output_file_id), job.store.path(record.error_file_id)
        answers = await self._of(job, Answers, *paths, job.store.writing)
        try:
            async with asyncio.TaskGroup() as tasks:
                is_over = asyncio.Event()
                tasks.create_task(self._keep_saved(job, answers, is_over))
                sending = tasks.create_task(self._send_all(job, answers))
                stopping = tasks.create_task(job.stops.wait())
                seconds = max(record.expires_at - time.time(), 0)
                await asyncio.wait((sending, stopping), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                is_whole = sending.done()
                is_over.set()
                sending.cancel()
                stopping.cancel()
            outcome: Status = "completed" if is_whole else "cancelled" if job.stops.is_set() else "expired"
            if job.no_room is not None:
                outcome = "failed"
            elif outcome != "completed":
                await self._give_up_others(job, answers, *UNANSWERED[outcome])
            await self._of(job, answers.sync)
            ending = replace(record, status="finalizing", finalizing_at=_now(), outcome=outcome)
            if job.no_room is not None:
                ending = replace(ending, errors=(_lack_of_room(job.no_room),))
            await self._save(job, _counted(ending, answers))
        finally:
            await self._of(job, answers.close)

    async def _send_all(self, job: _Job, answers: Answers) -> None:
        """Send lines while there is room for them, and return when all are answered."""
        permits = asyncio.Semaphore(self._lane.most)  # for lines that pause too, which hold no room
        async with asyncio.TaskGroup() as sending:
            async for _, raw in self._lines(job):
                line = self._parsed(job, raw)
                if line.custom_id not in answers:
                    await permits.acquire()
                    sending.create_task(
                        self._answer(job, self._line_calls.call(line, job.record), answers, permits)
                    )

    async def _answer(self, job: _Job, call: LineCall, answers: Answers, permits: asyncio.Semaphore) -> None:
        """Answer a line, however often its call must be tried again."""
        while True:
            async with self._lane.turn(call.num_sequences):
                outcome = await call.attempt()
            if not isinstance(outcome, float):
                break
            await asyncio.sleep(outcome)
        is_good, line = outcome
        await self._append(job, answers, call.custom_id, line, is_good=is_good)
        permits.release()

    async def _append(
        self, job: _Job, answers: Answers, custom_id: str, line: bytes, *, is_good: bool
    ) -> None:
        """Write an answer. If there is no room for it, the batch writes nothing more."""
        try:
            if job.no_room is None:
                await self._of(job, answers.append, custom_id, line, is_good=is_good)
        except LimitPassed as error:
            job.no_room = error
            job.stops.set()

    async def _give_up_others(self, job: _Job, answers: Answers, code: str, message: str) -> None:
        """Write an error for each line without an answer, while there is room."""
        async for number, raw in self._lines(job):
            if job.no_room is not None:
                return
            custom_id = self._parsed(job, raw).custom_id
            if custom_id not in answers:
                line = unanswered_line(custom_id, code=code, message=message)
                await self._append(job, answers, custom_id, line, is_good=False)
            elif number % CHECKS_A_TICK == 0:
                await asyncio.sleep(CHECK_PAUSE_SECONDS)

    async def _keep_saved(self, job: _Job, answers: Answers, is_over: asyncio.Event) -> None:
        """Sync answers and save their number. Not cancelled at the end: a thread would go on to write an old record."""
        while not is_over.is_set():
            await _within(is_over, SYNC_SECONDS)
            counted = _counted(job.record, answers)
            if counted != job.record:
                await self._of(job, answers.sync)
                await self._save(job, counted)

    async def _end(self, job: _Job) -> None:
        await self._of(job, _publish, job.record, job.store)
        times: dict[str, Any] = {f"{job.record.outcome}_at": _now()}
        if job.record.outcome == "cancelled":
            times["cancelling_at"] = job.record.finalizing_at or _now()
        await self._save(job, replace(job.record, status=job.record.outcome, **times))


def _counted(record: BatchRecord, answers: Answers) -> BatchRecord:
    return replace(record, completed=answers.num_good, failed=answers.num_bad)


def _publish(record: BatchRecord, store: TenantStore) -> None:
    """Add the records of the files of answers. An empty file is removed."""
    for file_id, kind in ((record.output_file_id, "output"), (record.error_file_id, "error")):
        path = store.path(file_id)
        num_bytes = path.stat().st_size if path.exists() else 0
        if not num_bytes:
            path.unlink(missing_ok=True)
        else:
            store.add_file(
                FileRecord(
                    id=file_id,
                    filename=f"{record.id}_{kind}.jsonl",
                    purpose="batch_output",
                    num_bytes=num_bytes,
                    # In the order of its id, which was drawn with the batch.
                    created_at=record.created_at,
                )
            )


def _lack_of_room(reason: LimitPassed) -> LineError:
    return LineError(code=reason.code, message=f"{reason}; the lines in neither file have no answer")


def _opened(path: Path) -> BinaryIO:
    return path.open("rb")


def _whole_lines(file: BinaryIO, longest: int) -> list[bytes]:
    """Read lines, about READ_BYTES of them. Of a line that is longer than `longest` only its beginning is returned."""
    lines: list[bytes] = []
    num_bytes = 0
    while num_bytes < READ_BYTES and (line := file.readline(longest)):
        lines.append(line)
        num_bytes += len(line)
        while len(line) == longest and not line.endswith(b"\n"):
            line = file.readline(longest)
    return lines


async def _within(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _names(error: BaseException) -> str:
    """Return the type of the exception, or of the first one in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return type(error).__name__


def _now() -> int:
    return int(time.time())
