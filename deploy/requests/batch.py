"""Answers a file of requests in OpenAI's batch format into another file, line by line.

Owns the format, which lines are still to be answered, and that each is answered once. A line of the output is written
whole before the next: after an interruption the same command goes on where it ended. How a server is reached is
openai_server.py's.
"""

import asyncio
import json
import os
import random
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockyard.deploy.requests.openai_server import CallFailed, OpenAIServer

PATHS = ("/v1/completions", "/v1/chat/completions")
OUT_OF_REACH = frozenset({"NO_CONNECTION", "NO_TLS", "NOT_HTTP"})
"""These reasons end a run, since no line would be answered now."""
RETRY_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds to wait before each retry. Each is multiplied by a random factor of 0.5 to 1.5."""
MOST_REASON_CHARACTERS = 300
"""Longest part of a server's error text that is printed."""
STREAMS = "a batch has whole answers: leave stream out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the input. `error`: why it cannot be sent."""

    custom_id: str | None
    url: str = ""
    body: dict[str, Any] | None = None
    error: str = ""


@dataclass(slots=True, kw_only=True)
class Counts:
    """How far a batch is."""

    total: int
    skipped: int = 0
    """Answered by an earlier run."""
    succeeded: int = 0
    failed: int = 0
    first_failure: str = ""
    """Id of the line that failed first in this run, and the reason. Empty if none failed."""

    def count(self, custom_id: str | None, error: str) -> None:
        """Count one line. `error` is empty for a line that was answered."""
        self.failed += bool(error)
        self.succeeded += not error
        if error and not self.first_failure:
            self.first_failure = f"{custom_id}: {' '.join(error.split())[:MOST_REASON_CHARACTERS]}"


def read_lines(texts: Iterable[str]) -> Iterator[Line]:
    """Reads the input, blank lines left out. A second line of one custom_id is a wrong one."""
    seen: set[str] = set()
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        line = _line(text, number)
        if line.custom_id is not None and line.custom_id in seen:
            line = Line(
                custom_id=f"{line.custom_id} (line {number})", error="another line has this custom_id"
            )
        if line.custom_id is not None:
            seen.add(line.custom_id)
        yield line


def answered_ids(texts: Iterable[str]) -> set[str | None]:
    """Return the custom_ids that an output has answered, whether with success or not."""
    return {json.loads(text)["custom_id"] for text in texts if text.strip()}


def _line(text: str, number: int) -> Line:
    unnamed = f"line {number}"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Line(custom_id=unnamed, error=f"not JSON: {error}")
    if not isinstance(found, dict):
        return Line(custom_id=unnamed, error="not an object")
    custom_id = found.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return Line(custom_id=unnamed, error="custom_id must be a text")
    url, body = str(found.get("url")), found.get("body")
    wrong = (
        f"method must be POST, not {found.get('method')!r}"
        if found.get("method", "POST") != "POST"
        else f"url must be one of {', '.join(PATHS)}, not {url!r}"
        if url not in PATHS
        else "body must be an object"
        if not isinstance(body, dict)
        else STREAMS
        if body.get("stream")
        else ""
    )
    return Line(custom_id=custom_id, error=wrong) if wrong else Line(custom_id=custom_id, url=url, body=body)


def result_line(line: Line, answer: Any = None, failure: CallFailed | None = None) -> str:
    """Make one line of the output, in OpenAI's form."""
    error = line.error if failure is None else str(failure)
    code = "invalid_line" if line.error else "" if failure is None else failure.reason.lower()
    status = 200 if not error else failure.status if failure is not None else 400
    response = None
    if status is not None:
        body = answer if not error else {"error": {"message": error, "code": code}}
        response = {"status_code": status, "request_id": f"req-{secrets.token_hex(8)}", "body": body}
    document = {
        "id": f"batch-{secrets.token_hex(8)}",
        "custom_id": line.custom_id,
        "response": response,
        "error": {"code": code, "message": error} if error else None,
    }
    return json.dumps(document) + "\n"


def mend(path: Path) -> None:
    """Cuts off a last line that an interruption left unfinished: its request is answered again."""
    with path.open("r+b") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)


async def run_batch(
    server: OpenAIServer,
    lines: Iterable[Line],
    output: Path,
    *,
    concurrency: int,
    counts: Counts,
    told: Callable[[], None],
) -> None:
    """Answers what is still to be answered, at most so many lines at once. Raises CallFailed where the server is out of
    reach: what it did not answer is left for the next run."""
    waiting = iter(lines)
    with output.open("a", encoding="utf-8") as file:

        def write(text: str) -> None:
            file.write(text)
            file.flush()

        async def place() -> None:
            for line in waiting:
                answer, failure = None, None
                if line.body is not None:
                    try:
                        answer = await _answered(server, line.url, line.body)
                    except CallFailed as error:
                        if error.reason in OUT_OF_REACH:
                            raise
                        failure = error
                write(result_line(line, answer, failure))
                counts.count(line.custom_id, line.error or ("" if failure is None else str(failure)))
                told()

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(concurrency):
                    tasks.create_task(place())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        os.fsync(file.fileno())


async def _answered(server: OpenAIServer, path: str, body: dict[str, Any]) -> Any:
    """Asks again where a server is full or went away in the middle. Raises CallFailed."""
    for pause in RETRY_PAUSES:
        try:
            return await server.post(path, body)
        except CallFailed as error:
            if error.status not in (429, 503) and error.reason != "CONNECTION_LOST":
                raise
            await asyncio.sleep(pause * (0.5 + random.random()))
    return await server.post(path, body)
