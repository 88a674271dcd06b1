"""Roles: the part of a request for which a worker is meant.

Does not own which requests a worker of a role takes (router/placement/splits.py).
"""

from typing import Literal, get_args

Role = Literal["both", "prefill", "decode"]


def role_named(name: str) -> Role:
    """Return the role of this name. A worker of another version may name none, or one that is unknown: `both`."""
    return next((role for role in get_args(Role) if role == name), "both")
