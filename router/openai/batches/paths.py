"""Paths of files and batches, and the parameters of their lists."""

from collections.abc import Mapping
from typing import Any

FILES, BATCHES = "/v1/files", "/v1/batches"
FILE, CONTENT = f"{FILES}/{{file_id}}", f"{FILES}/{{file_id}}/content"
BATCH, CANCEL = f"{BATCHES}/{{batch_id}}", f"{BATCHES}/{{batch_id}}/cancel"
ALL = (FILES, FILE, CONTENT, BATCHES, BATCH, CANCEL)
ID = "(?:file-|batch_)[0-9a-f]{32}"
"""Pattern of the id of a file or a batch."""
DEFAULT_LIMITS = {FILES: 1000, BATCHES: 20}
MAX_PAGE = 1000
PAGE_QUERY: Mapping[str, Mapping[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string", "pattern": f"^{ID}$"},
}
"""Parameters of a list, as JSON schemas. `limit` has DEFAULT_LIMITS."""


def known_path(path: str) -> str | None:
    """Return the template of a path of files or batches, or None for another path."""
    match path.split("/")[1:]:
        case ["v1", "files"]:
            return FILES
        case ["v1", "files", _]:
            return FILE
        case ["v1", "files", _, "content"]:
            return CONTENT
        case ["v1", "batches"]:
            return BATCHES
        case ["v1", "batches", _]:
            return BATCH
        case ["v1", "batches", _, "cancel"]:
            return CANCEL
        case _:
            return None
