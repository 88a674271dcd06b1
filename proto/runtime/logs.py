"""Logs of a cluster's processes: on stderr, as text or as one JSON object a line, at one level.

Owns the format, and the id of the request that a line is about. Code that works on a request sets REQUEST_ID, and every
line that it causes has the id. So the id in a client's error finds all lines. At no level may a line hold what a client
sent, except names: tests/nightly/security/test_canary.py.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, get_args

LEVEL_VARIABLE = "BLOCKYARD_LOG_LEVEL"
FORMAT_VARIABLE = "BLOCKYARD_LOG_FORMAT"
GRPC_LOGGER = "grpc._cython.cygrpc"
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that this task works on. A name, never free text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Log settings of one process. Raises ValueError for bad values."""

    level: str = "info"
    format: str = "text"

    def __post_init__(self) -> None:
        _check(LEVEL_VARIABLE, self.level, get_args(LogLevel))
        _check(FORMAT_VARIABLE, self.format, get_args(LogFormat))

    @classmethod
    def from_environment(cls, level: str | None = None, format: str | None = None) -> "LogConfig":
        """Return settings from the given values, else the environment's, else the defaults. Raises ValueError for bad
        values."""
        return cls(
            level=(level or os.environ.get(LEVEL_VARIABLE) or "info").lower(),
            format=(format or os.environ.get(FORMAT_VARIABLE) or "text").lower(),
        )


def configure_logging(config: LogConfig | None = None, **identity: str) -> None:
    """Set up logging. `identity` says which process logs, such as worker_id and incarnation, and stands in JSON lines
    alone. Without a config the environment's is taken. Raises ValueError for an unknown level or format."""
    config = LogConfig.from_environment() if config is None else config
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(identity) if config.format == "json" else TextFormatter())
    logging.basicConfig(level=config.level.upper(), handlers=[handler])
    logging.getLogger(GRPC_LOGGER).addFilter(is_no_lost_answer)


def is_no_lost_answer(record: logging.LogRecord) -> bool:
    """Return False for gRPC's report that an answer could not be sent because the call had ended.

    gRPC reports this as an error, with a traceback, if it has not noticed yet that the client is gone. Its reports of
    misuse, such as two writes at once, have another text.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not (type(error).__name__ == "ExecuteBatchError" and '"execute_batch"' in str(error))


@contextmanager
def about(request_id: str) -> Iterator[None]:
    """Give this request's id to every line that is logged inside the context."""
    token = REQUEST_ID.set(request_id)
    try:
        yield
    finally:
        REQUEST_ID.reset(token)


class TextFormatter(logging.Formatter):
    """Formats lines for people. A line about a request ends with the request's id."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line, request_id = super().formatMessage(record), REQUEST_ID.get()
        return f"{line} [{request_id}]" if request_id else line


class JsonFormatter(logging.Formatter):
    """Formats one object a line: time (UTC), level, logger, message and identity, and request_id and exception if there
    is one."""

    def __init__(self, identity: dict[str, str]) -> None:
        super().__init__()
        self._identity = identity

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._identity,
        }
        if request_id := REQUEST_ID.get():
            fields["request_id"] = request_id
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _check(variable: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{variable} must be one of {', '.join(allowed)}, not {value!r}")
