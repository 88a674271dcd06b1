"""What names that clients and operators choose may look like: fit for logs, metadata and Redis keys as they stand.

Pure. Does not own which fields are names, nor how a wrong one is told (router/request/validation.py,
router/admission/fair_queue.py).
"""

import re

TENANT_KEY = "blockyard-tenant"
"""The key of a call's metadata that names its tenant."""
MAX_NAME_CHARS = 128
NAME_RULE = f"[A-Za-z0-9._:-] with at most {MAX_NAME_CHARS} characters"
_NAME = re.compile(r"[A-Za-z0-9._:-]*")
_MODEL_NAME = re.compile(r"[A-Za-z0-9._:/@-]+")


def is_name(text: str) -> bool:
    """The empty one too: a name that is left out."""
    return len(text) <= MAX_NAME_CHARS and _NAME.fullmatch(text) is not None


def is_id(text: str) -> bool:
    return bool(text) and is_name(text)


def is_model_name(text: str) -> bool:
    """Return True if the text reads as a model's name. Names on the hub have an owner before a slash."""
    return len(text) <= MAX_NAME_CHARS and _MODEL_NAME.fullmatch(text) is not None


def is_variable(text: str) -> bool:
    """Whether a chat template can read it by this name."""
    return len(text) <= MAX_NAME_CHARS and text.isascii() and text.isidentifier()
