"""Signing in to the live page: its files are served without Ray's token, so that the page itself can ask for it.

Owns which paths of Ray's dashboard are open, and the address that signs in. The files hold no data: every question of
the page still needs the token, which Ray's own /api/authenticate turns into a cookie that scripts cannot read. The
token stands in the address's fragment, which browsers never send, so that no log and no Referer has it.
"""

import html
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from blockyard.deploy.dashboard.start_hook import LIVE_PAGE_PATH

PAGE_FILES = Path(__file__).with_name("page")
REDIRECT_FILE = "sign-in.html"


def open_paths() -> frozenset[str]:
    """Paths that hold no data: the page, and its scripts and styles."""
    names = (file.name for file in PAGE_FILES.iterdir() if file.name != "no-chart.html")
    return frozenset((f"/{LIVE_PAGE_PATH}", *(f"/{LIVE_PAGE_PATH}/{name}" for name in names)))


def open_page_files() -> None:
    """Make this process's dashboard serve the page's files without a token.

    Raises ImportError or AttributeError for a Ray whose dashboard checks tokens elsewhere; then its whole answer to a
    browser without one is a line of text, as before.
    """
    from ray._private.authentication import http_token_authentication as authentication

    check: Callable[..., Any] = authentication.get_token_auth_middleware

    def with_page(aiohttp_module: Any, exact: Collection[str] | None = None, *rest: Any, **named: Any) -> Any:
        return check(aiohttp_module, {*(exact or ()), *open_paths()}, *rest, **named)

    authentication.get_token_auth_middleware = with_page  # type: ignore[assignment]


def sign_in_url(dashboard_url: str, token_path: str | None) -> str:
    """The page's address, with the token in its fragment where Ray asks for one. Raises OSError."""
    page = f"{dashboard_url}/{LIVE_PAGE_PATH}"
    if token_path is None:
        return page
    return f"{page}#token={Path(token_path).read_text(encoding='ascii').strip()}"


def redirect_file(directory: Path, url: str) -> Path:
    """A file that leads a browser to the address, for its owner alone.

    A browser's command line is for every user of the machine to read, so that the token must not stand there.
    """
    file = directory / REDIRECT_FILE
    file.unlink(missing_ok=True)
    file.touch(mode=0o600, exist_ok=False)
    file.write_text(
        f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(url)}"><title>Blockyard</title>\n',
        encoding="utf-8",
    )
    return file
