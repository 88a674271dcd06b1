"""The supervisor's report in Ray's key-value store. A command that looks finds it there and is no Ray driver: each of
those is a job in Ray's list.

Owns its text, both ways, and how a reader knows that the supervisor still answers: it stores its report again and
again, and a reader waits for the next one. So no clocks are compared. The store is as open as Ray itself: whoever is
let in may ask the supervisor for the same.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from blockyard.deploy.supervision.replicas import Place, SupervisorReport

BEAT_SECONDS = 0.5
POLL_SECONDS = 0.05
NAMESPACE = b"blockyard-reports"
"""Not the announcements', of which the dashboard reads all."""


class SilentSupervisorError(RuntimeError):
    """It has stored no report within the time that a reader has."""


def encoded(report: SupervisorReport, beat: int) -> bytes:
    """`beat` makes each of one supervisor differ from the one before."""
    return json.dumps({"beat": beat, **asdict(report)}).encode()


def decoded(text: bytes) -> SupervisorReport:
    """Raises ValueError for what no supervisor of this version has written."""
    try:
        document: dict[str, Any] = json.loads(text)
        del document["beat"]
        places = [Place(**place) for place in document.pop("places")]
        return SupervisorReport(places=places, **document)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError("the supervisor's report is not one of this version") from error


async def keep_reported(
    report: Callable[[], SupervisorReport], store: Callable[[bytes], Awaitable[object]]
) -> None:
    """Until cancelled. Runs in the supervisor."""
    for beat in itertools.count():
        await store(encoded(report(), beat))
        await asyncio.sleep(BEAT_SECONDS)


def next_report(read: Callable[[], bytes | None], seconds: float) -> SupervisorReport:
    """Waits for a report that was stored after the call. `read` returns the one that is stored now. Raises
    SilentSupervisorError, ValueError, and what `read` raises."""
    deadline = time.monotonic() + seconds
    before = read()
    while time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        if (now := read()) is not None and now != before:
            return decoded(now)
    raise SilentSupervisorError(f"the supervisor did not answer within {seconds:.1f} s")
