"""Sends a file of requests in OpenAI's batch format, and writes the answers to another file.

Owns the format, and answering each line once. Output lines are written whole and one at a time, so that the same
command continues after an interruption. The calls to the server are in openai_server.py.
"""

import asyncio
import json
import os
import random
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from blockyard.deploy.requests.openai_server import CallFailed, OpenAIServer

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses")
OUT_OF_REACH = frozenset({"NO_CONNECTION", "NO_TLS", "NOT_HTTP"})
"""Reasons of errors that end a run, because no further line would be answered."""
RETRY_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds to wait before each retry. Each is multiplied by a random factor of 0.5 to 1.5."""
MOST_REASON_CHARACTERS = 300
"""Length to which a server's error text is cut for printing."""
STREAMS = "a batch does not stream: leave out stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the input. `error` says why it cannot be sent, or is ""."""

    custom_id: str | None
    url: str = ""
    body: dict[str, Any] | None = None
    error: str = ""

    def with_priority(self, priority: int | None) -> Self:
        """Return the line with this priority, where its body names none."""
        if self.body is None or priority is None:
            return self
        return replace(self, body={"priority": priority, **self.body})


@dataclass(slots=True, kw_only=True)
class Counts:
    """Progress of a batch, in lines."""

    total: int
    skipped: int = 0
    """Lines that an earlier run has answered."""
    succeeded: int = 0
    failed: int = 0
    first_failure: str = ""
    """Id of the line that failed first in this run, and the reason. "" if none failed."""

    def count(self, custom_id: str | None, error: str) -> None:
        """Count one line. `error` is "" for a line that was answered."""
        self.failed += bool(error)
        self.succeeded += not error
        if error and not self.first_failure:
            self.first_failure = f"{custom_id}: {' '.join(error.split())[:MOST_REASON_CHARACTERS]}"


def read_lines(texts: Iterable[str]) -> Iterator[Line]:
    """Yield the lines of the input without blank ones. A line with the custom_id of an earlier one gets an error."""
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
    """Return the custom_ids in an output file, of successes and failures."""
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
        return Line(custom_id=unnamed, error="custom_id must be a string that is not empty")
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
    """Make one line of the output, in OpenAI's format."""
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
    """Cut off an unfinished last line, which an interruption left. Its request is then sent again."""
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
    on_progress: Callable[[], None],
) -> None:
    """Send `lines`, at most `concurrency` at once, and append the answers to `output`.

    Raise CallFailed if the server cannot be reached. The remaining lines are left for the next run.
    """
    waiting = iter(lines)
    with output.open("a", encoding="utf-8") as file:

        def write(text: str) -> None:
            file.write(text)
            file.flush()

        async def answer_lines() -> None:
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
                on_progress()

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(concurrency):
                    tasks.create_task(answer_lines())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        os.fsync(file.fileno())


async def _answered(server: OpenAIServer, path: str, body: dict[str, Any]) -> Any:
    """Send one request and return its answer. Retry while the server is full (429, 503) or the connection breaks.

    Raise CallFailed for another failure, or after the last retry.
    """
    for pause in RETRY_PAUSES:
        try:
            return await server.post(path, body)
        except CallFailed as error:
            if error.status not in (429, 503) and error.reason != "CONNECTION_LOST":
                raise
            await asyncio.sleep(pause * (0.5 + random.random()))
    return await server.post(path, body)
