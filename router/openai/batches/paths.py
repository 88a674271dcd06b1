"""Paths of files and batches."""

FILES, BATCHES = "/v1/files", "/v1/batches"
FILE, CONTENT = f"{FILES}/{{file_id}}", f"{FILES}/{{file_id}}/content"
BATCH, CANCEL = f"{BATCHES}/{{batch_id}}", f"{BATCHES}/{{batch_id}}/cancel"
ALL = (FILES, FILE, CONTENT, BATCHES, BATCH, CANCEL)


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
