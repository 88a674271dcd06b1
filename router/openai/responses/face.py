"""Face of /v1/responses: the response object, whole or with the events of its stream."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from blockyard.proto.v1 import inference_pb2
from blockyard.router.errors import InvalidRequest, Overloaded, RouterError
from blockyard.router.generation.client_buffer import Delta
from blockyard.router.openai.answers.face import Head
from blockyard.router.openai.http.errors import error_body
from blockyard.router.openai.requests.wanted import Wanted
from blockyard.router.openai.responses.output import EventWriter, OutputForm
from blockyard.router.openai.responses.read_output import ReadOutput

Keep = Callable[[Mapping[str, Any]], Awaitable[bool]]
"""Keeps a response for a later one, and returns whether it is kept. It never raises."""


async def keep_nothing(response: Mapping[str, Any]) -> bool:
    return False


class ResponseFace:
    def __init__(
        self, wanted: Wanted, echo: Mapping[str, Any], form: OutputForm, keep: Keep, head: Head
    ) -> None:
        """`echo`: the fields of the request that the response repeats."""
        self._names = wanted.names
        self._keep = keep
        self._writer = EventWriter()
        self.tally = ReadOutput(wanted, self._writer, form)
        self._has_begun = False
        self._response: Mapping[str, Any] = {
            "id": form.response_id,
            "object": "response",
            "created_at": head.created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": head.model,
            "output": [],
            "usage": None,
            **echo,
        }

    async def whole(self, outputs: Sequence[inference_pb2.Output]) -> dict[str, Any]:
        return await self._finished()

    def events(self, delta: Delta) -> bytes:
        begun = b"" if self._has_begun else self._begun()
        self.tally.add(delta)
        return begun + self.tally.told

    async def end(self) -> bytes:
        response = await self._finished()
        return self._writer.write(f"response.{response['status']}", {"response": response})

    def failed(self, error: RouterError) -> bytes:
        said = error_body(error, self._names)["error"]
        failed = {
            **self._response,
            "status": "failed",
            "error": {"code": _error_code(error), "message": said["message"]},
            "output": self.tally.items,
            "usage": self.tally.usage(),
            "store": False,
        }
        shown = {name: said[name] for name in ("code", "message", "param")}
        return self._writer.write("error", shown) + self._writer.write(
            "response.failed", {"response": failed}
        )

    def _begun(self) -> bytes:
        self._has_begun = True
        return b"".join(
            self._writer.write(f"response.{name}", {"response": self._response})
            for name in ("created", "in_progress")
        )

    async def _finished(self) -> dict[str, Any]:
        tally = self.tally
        is_whole = tally.status == "completed"
        response = {
            **self._response,
            "status": tally.status,
            "completed_at": int(time.time()) if is_whole else None,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": tally.items,
            "usage": tally.usage(),
            "worker_id": tally.worker_id,
        }
        # Before the client knows the end: its next request may name this response at once.
        return response | {"store": await self._keep(response | {"store": True})}


def _error_code(error: RouterError) -> str:
    """Return the code of OpenAI's few that says most of the error."""
    if isinstance(error, Overloaded):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"
