"""Records of files and batches: what the folder keeps of them, and what clients see. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED: frozenset[Status] = frozenset({"completed", "failed", "expired", "cancelled"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    id: str
    filename: str
    """Name that the client gave. It is never a path of ours."""
    purpose: Literal["batch", "batch_output"]
    num_bytes: int
    created_at: int

    def shown(self) -> dict[str, Any]:
        """Return the file as OpenAI's object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Caller of a batch, under whose name its requests run."""

    tenant: str
    token_name: str | None = None
    """Name of the token that created the batch. None where clients do not authenticate."""
    role: str = ""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineError:
    """Why a file cannot be run, with the number of the line. `line` is None for the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    id: str
    owner: Owner
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_file_id: str
    """Id of the file of answers. It is shown once the file has a line and is complete."""
    error_file_id: str
    status: Status = "validating"
    outcome: Status = "completed"
    """How a batch that is finalizing ends."""
    metadata: Mapping[str, str] | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    errors: tuple[LineError, ...] = ()
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def shown(self, *, is_cancelled: bool) -> dict[str, Any]:
        """Return the batch as OpenAI's object. `is_cancelled`: a client has asked for its end."""
        is_cancelling = is_cancelled and not self.has_ended
        errors = [
            {"code": error.code, "line": error.line, "message": error.message, "param": error.param}
            for error in self.errors
        ]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": "cancelling" if is_cancelling else self.status,
            "output_file_id": self.output_file_id if self.has_ended and self.completed else None,
            "error_file_id": self.error_file_id if self.has_ended and self.failed else None,
            "created_at": self.created_at,
            "in_progress_at": self.in_progress_at,
            "expires_at": self.expires_at,
            "finalizing_at": self.finalizing_at,
            "completed_at": self.completed_at,
            "failed_at": self.failed_at,
            "expired_at": self.expired_at,
            "cancelling_at": self.cancelling_at,
            "cancelled_at": self.cancelled_at,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


def batch_record(document: Mapping[str, Any]) -> BatchRecord:
    """Return the record that `dataclasses.asdict` has turned into this document."""
    return BatchRecord(
        **{
            **document,
            "owner": Owner(**document["owner"]),
            "errors": tuple(LineError(**error) for error in document["errors"]),
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Question of a client to a list."""

    limit: int | None = None
    """Most records that are read and returned. None: all."""
    after: str | None = None
    """Id behind which the page begins. Its object may have been deleted."""
    newest_first: bool = True
    purpose: str | None = None

    def in_order(self, ids: Iterable[str]) -> list[str]:
        """Return the ids behind `after`, in order. Ids begin with the time of their creation."""
        after, newest_first = self.after, self.newest_first
        behind = (
            ids if after is None else (one for one in ids if one != after and (one < after) == newest_first)
        )
        return sorted(behind, reverse=newest_first)

    def takes(self, purpose: str) -> bool:
        return self.purpose in (None, purpose)


EVERYTHING = Query()


def page_document(shown: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return a page of at most `limit` objects, as OpenAI's list. One object more means that another page follows."""
    listed = shown[:limit]
    return {
        "object": "list",
        "data": listed,
        "first_id": listed[0]["id"] if listed else None,
        "last_id": listed[-1]["id"] if listed else None,
        "has_more": len(shown) > limit,
    }
