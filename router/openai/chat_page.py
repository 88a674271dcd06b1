"""Chat page: a file that talks to the gateway that served it, with the headers that keep it to itself."""

from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files


def chat_page() -> tuple[bytes, Mapping[str, str]]:
    """Return the page and its headers. It runs its own script alone, and reaches no other server."""
    text = files("blockyard.router.openai").joinpath("page", "chat.html").read_text(encoding="utf-8")
    style, script = (_hash(text, tag) for tag in ("style", "script"))
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; connect-src 'self'; "
        f"style-src '{style}'; script-src '{script}'"
    )
    return text.encode(), {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _hash(text: str, tag: str) -> str:
    """Return the hash of the one element of this name, as a content policy names it."""
    inside = text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"sha256-{b64encode(sha256(inside.encode()).digest()).decode()}"
