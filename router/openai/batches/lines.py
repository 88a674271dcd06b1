"""Lines of a batch: the checks of a request's line, and the lines of answers. Pure.

Owns OpenAI's format. Does not own the checks of a request's body (../requests/).
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockyard.router.errors import InvalidRequest
from blockyard.router.openai.batches.records import LineError
from blockyard.router.openai.http.body import parse_json
from blockyard.router.openai.http.json_response import encoded

FIELDS = ("custom_id", "method", "url", "body")
MAX_CUSTOM_ID_CHARACTERS = 512
LINE_BYTES = 4096
"""Room of a line beside its body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    custom_id: str
    body: Mapping[str, Any]


class BadLine(Exception):
    """A line that no request can be made of."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param

    def at(self, number: int) -> LineError:
        return LineError(code=self.code, message=self.message, line=number, param=self.param)


def parse_line(raw: bytes, *, endpoint: str, most_values: int) -> Line:
    """Return the request of a line. Raises BadLine."""
    try:
        found = parse_json(raw, most_values=most_values)
    except InvalidRequest as error:
        raise BadLine("invalid_json_line", error.message.replace("the body", "the line")) from None
    custom_id, body = found.get("custom_id"), found.get("body")
    for name in FIELDS:
        if name not in found:
            raise BadLine("missing_required_parameter", f"{name} is required", name)
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARACTERS:
        rule = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARACTERS} characters"
        raise BadLine("invalid_custom_id", rule, "custom_id")
    try:
        custom_id.encode()
    except UnicodeEncodeError:
        raise BadLine("invalid_custom_id", "custom_id must be valid Unicode", "custom_id") from None
    if found["method"] != "POST":
        raise BadLine("invalid_method", "method must be POST", "method")
    if found["url"] != endpoint:
        raise BadLine("invalid_url", f"url must be the batch's endpoint, {endpoint}", "url")
    if not isinstance(body, dict):
        raise BadLine("invalid_body", "body must be an object", "body")
    return Line(custom_id=custom_id, body=body)


def num_inputs(body: Mapping[str, Any]) -> int:
    """Return how many embeddings a body asks for. What is no valid input counts as one."""
    asked = body.get("input")
    return len(asked) if isinstance(asked, list) and asked and not isinstance(asked[0], int) else 1


def answer_line(custom_id: str, *, status: int, request_id: str, body: bytes) -> bytes:
    """Return the line of a request that the route has answered or refused, with the JSON of its answer."""
    response = encoded({"status_code": status, "request_id": request_id})
    return _line(custom_id, response[:-1] + b',"body":' + body + b"}", None)


def unanswered_line(custom_id: str, *, code: str, message: str) -> bytes:
    """Return the line of a request that was not sent, or has not ended."""
    return _line(custom_id, b"null", {"code": code, "message": message})


def _line(custom_id: str, response: bytes, error: Mapping[str, str] | None) -> bytes:
    head = encoded(
        {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id, "error": error},
    )
    # An answer may have megabytes of numbers. It is not parsed again to be encoded with its line.
    return head[:-1] + b',"response":' + response + b"}\n"
