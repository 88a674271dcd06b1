"""Reports: the supervisor's report in Ray's key-value store, which commands read without becoming a Ray driver.

Each driver would be a job in Ray's list. Owns encoding and decoding, and how a reader knows that the supervisor still
runs. The supervisor stores its report again and again, and a reader waits for the next one. So no clocks are compared.
The store is as open as Ray itself, so the report holds nothing that the supervisor would not answer anyway.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from blockyard.deploy.supervision.replicas import Replica, SupervisorReport

BEAT_SECONDS = 0.5
POLL_SECONDS = 0.05
NAMESPACE = b"blockyard-reports"
"""Not the namespace of announcements, because the dashboard reads all of that one."""


class SilentSupervisorError(RuntimeError):
    """The supervisor has stored no report within the reader's deadline."""


def encoded(report: SupervisorReport, beat: int) -> bytes:
    """Encode a report. `beat` numbers the reports, so that each one differs from the one before."""
    document = asdict(report)
    return json.dumps({"beat": beat, "places": document.pop("replicas"), **document}).encode()


def decoded(text: bytes) -> SupervisorReport:
    """Decode a report. Raise ValueError for a text that no supervisor of this version has written."""
    try:
        document: dict[str, Any] = json.loads(text)
        del document["beat"]
        replicas = [_replica(place) for place in document.pop("places")]
        models = tuple(document.pop("models"))
        return SupervisorReport(replicas=replicas, models=models, **document)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError("the supervisor's report is not one of this version") from error


def _replica(place: dict[str, Any]) -> Replica:
    ranks = tuple((str(node_id), int(pid)) for node_id, pid in place["ranks"])
    return Replica(**{**place, "ranks": ranks})


async def keep_reported(
    report: Callable[[], SupervisorReport], store: Callable[[bytes], Awaitable[object]]
) -> None:
    """Store the report every BEAT_SECONDS, until cancelled. Runs in the supervisor."""
    for beat in itertools.count():
        await store(encoded(report(), beat))
        await asyncio.sleep(BEAT_SECONDS)


def next_report(read: Callable[[], bytes | None], seconds: float) -> SupervisorReport:
    """Wait for the first report that is stored after the call, and return it. `read` returns what is stored now.

    Raise SilentSupervisorError if none comes in time, ValueError for another version's, and what `read` raises.
    """
    deadline = time.monotonic() + seconds
    before = read()
    while time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        if (now := read()) is not None and now != before:
            return decoded(now)
    raise SilentSupervisorError(f"the supervisor did not answer within {seconds:.1f} s")
