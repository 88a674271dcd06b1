"""Rules of names that clients and operators choose: safe in logs, metadata and Redis keys as they stand.

Pure. Does not own which fields are names, or the error for a wrong one (router/request/validation.py,
router/admission/fair_queue.py).
"""

import re

MAX_NAME_CHARS = 128
NAME_RULE = f"[A-Za-z0-9._:-] with at most {MAX_NAME_CHARS} characters"
_NAME = re.compile(r"[A-Za-z0-9._:-]*")
NAME_PATTERN = f"^{_NAME.pattern}$"
"""The characters of a name, for JSON schemas."""
VARIABLE_PATTERN = f"^[A-Za-z_][A-Za-z0-9_]{{0,{MAX_NAME_CHARS - 1}}}$"
"""Pattern of what `is_variable` takes, for JSON schemas."""
_MODEL_NAME = re.compile(r"[A-Za-z0-9._:/@-]+")


def is_name(text: str) -> bool:
    """Return whether the text is a name. The empty text is one too: a name that is left out."""
    return len(text) <= MAX_NAME_CHARS and _NAME.fullmatch(text) is not None


def is_id(text: str) -> bool:
    return bool(text) and is_name(text)


def is_model_name(text: str) -> bool:
    """Return whether the text is a model's name. Names on the hub have an owner before a slash."""
    return len(text) <= MAX_NAME_CHARS and _MODEL_NAME.fullmatch(text) is not None


def is_variable(text: str) -> bool:
    """Return whether a chat template can read a variable of this name."""
    return len(text) <= MAX_NAME_CHARS and text.isascii() and text.isidentifier()
