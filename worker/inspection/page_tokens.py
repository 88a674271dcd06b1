"""Page tokens: where a list goes on. Good for one list, of one life of one worker. Pure."""

import base64
import binascii

MAX_PAGE_TOKEN = 256
"""Characters. Python refuses to read a number of thousands of digits."""


def page_token(incarnation: str, kind: str, position: int) -> str:
    return base64.urlsafe_b64encode(f"{incarnation}:{kind}:{position}".encode()).decode()


def page_position(token: str, incarnation: str, kind: str) -> int | None:
    """What `page_token` was given; None for a token of another worker, another life, another list, or of nobody."""
    if len(token) > MAX_PAGE_TOKEN:
        return None
    try:
        life, listed, position = base64.urlsafe_b64decode(token).decode().split(":")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
    valid = (life, listed) == (incarnation, kind) and position.isdecimal()
    return int(position) if valid else None
