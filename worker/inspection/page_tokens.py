"""Page tokens: where a list continues. A token is good for one list, of one incarnation of one worker. Pure."""

import base64
import binascii

MAX_PAGE_TOKEN = 256
"""Maximum characters. Python refuses to read a number of thousands of digits."""


def page_token(incarnation: str, kind: str, position: int) -> str:
    return base64.urlsafe_b64encode(f"{incarnation}:{kind}:{position}".encode()).decode()


def page_position(token: str, incarnation: str, kind: str) -> int | None:
    """Return the position in a token. None for a token of another worker, incarnation or list, or of unknown origin."""
    if len(token) > MAX_PAGE_TOKEN:
        return None
    try:
        of_incarnation, of_kind, position = base64.urlsafe_b64decode(token).decode().split(":")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
    valid = (of_incarnation, of_kind) == (incarnation, kind) and position.isdecimal()
    return int(position) if valid else None
