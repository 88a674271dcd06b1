"""Signs browsers in to the live page by a URL with a key.

The key is derived from Ray's token by HMAC. It opens only the page, while Ray's token allows running code. The URL has
it in the fragment, which browsers do not send. The page's script posts it in a header and gets a cookie. Owns the paths
that need no token. Loaded by the dashboard's starter, so it imports very little.
"""

import hmac
import sys
from base64 import urlsafe_b64encode
from collections.abc import Awaitable, Callable
from functools import wraps
from hashlib import sha256
from pathlib import Path
from typing import Any

PAGE_PATH = "/blockyard"
SIGN_IN_PATH = f"{PAGE_PATH}/sign-in"
COOKIE = "blockyard-live-page"
BEARER = "Bearer "
PURPOSE = b"blockyard live page"
KEY_BYTES = 16
SIGN_IN_FILE = "sign-in.html"
PUBLIC_FILES = {"sign-in.js": "text/javascript", "style.css": "text/css", "dark.css": "text/css"}
"""Files that the form needs. They need no token. The rest of the page needs the key or Ray's token."""
REFUSED = frozenset({401, 403})
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    ),
}
LINK = (
    '<a href="blockyard" id="blockyard-link" style="position:fixed;right:16px;bottom:16px;z-index:10;padding:6px 12px;'
    'border-radius:16px;background:#1a6fb5;color:#fff;font:14px sans-serif;text-decoration:none">Blockyard</a>'
)
"""Link in a corner of Ray's page, which has no place for other links."""
Handler = Callable[[Any], Awaitable[Any]]


def page_key(ray_token: str) -> str:
    """Derive the page's key from Ray's token. It has 128 bits, so that the URL fits into a line of a terminal."""
    digest = hmac.new(ray_token.strip().encode(), PURPOSE, sha256).digest()
    return urlsafe_b64encode(digest[:KEY_BYTES]).decode().rstrip("=")


def page_url(dashboard_url: str, ray_token_path: str | None) -> str:
    """Return the page's URL, which signs in where Ray asks for a token. Raise OSError for an unreadable token file."""
    url = f"{dashboard_url}{PAGE_PATH}"
    if ray_token_path is None:
        return url
    return f"{url}#token={page_key(Path(ray_token_path).read_text(encoding='utf-8'))}"


def is_key(given: str, key: str | None) -> bool:
    """Tell, in constant time, whether `given` is the key. False if there is no key."""
    return key is not None and hmac.compare_digest(given.encode(errors="replace"), key.encode())


def install() -> None:
    """Make this process's dashboard accept the page's key. Call this before Ray's server is imported."""
    from ray._private.authentication import http_token_authentication as rays

    rays.get_token_auth_middleware = with_sign_in(
        rays.get_token_auth_middleware, _key_of_this_head, _rays_page_with_link()
    )


def _rays_page_with_link() -> bytes | None:
    """Return Ray's page with a link to ours. If Ray's is not as expected, return None and print a line on stderr."""
    from ray import dashboard

    try:
        page = Path(dashboard.__path__[0]) / "client" / "build" / "index.html"
        return with_link(page.read_text(encoding="utf-8")).encode()
    except (OSError, ValueError) as error:
        print(f"blockyard: Ray's page gets no link to /blockyard: {error!r}", file=sys.stderr)
        return None


def with_link(page: str) -> str:
    """Return Ray's page with a link to the live page. Raise ValueError if the page is not as expected."""
    if page.count("</body>") != 1 or '<div id="root">' not in page:
        raise ValueError("the page is not as expected")
    return page.replace("</body>", f"{LINK}</body>")


def _key_of_this_head() -> str | None:
    """Return the page's key on this head, or None where Ray asks for no token."""
    from ray._private.authentication.authentication_utils import is_token_auth_enabled
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    if not is_token_auth_enabled():
        return None
    for value in AuthenticationTokenLoader.instance().get_token_for_http_header().values():
        return page_key(value.removeprefix(BEARER))
    return None


def with_sign_in(
    get_middleware: Callable[..., Callable[[Any, Handler], Awaitable[Any]]],
    read_key: Callable[[], str | None],
    rays_page: bytes | None = None,
) -> Callable[..., Any]:
    """Wrap Ray's factory of the token check. The page's sign-in and its key are checked before Ray's token.

    `rays_page`, if given, replaces Ray's own index page.
    """

    @wraps(get_middleware)
    def get_with_sign_in(aiohttp_module: Any, *arguments: Any, **options: Any) -> Any:
        web, key = aiohttp_module.web, read_key()
        rays_check = get_middleware(aiohttp_module, *arguments, **options)

        def file(name: str, content_type: str, status: int = 200) -> Any:
            body = (Path(__file__).parent / "page" / name).read_bytes()
            return web.Response(
                body=body, status=status, content_type=content_type, charset="utf-8", headers=HEADERS
            )

        def signed_in(request: Any) -> Any:
            given = request.headers.get("Authorization", "").removeprefix(BEARER)
            if not is_key(given, key):
                return web.Response(status=403, text="This is not the key of this page.", headers=HEADERS)
            response = web.Response(status=204, headers=HEADERS)
            # Without a path the browser uses the page's own, even behind a proxy that adds to it.
            is_secure = request.scheme == "https"
            response.set_cookie(COOKIE, given, path="", httponly=True, samesite="Strict", secure=is_secure)
            return response

        @web.middleware  # type: ignore[untyped-decorator]
        async def check(request: Any, handler: Handler) -> Any:
            path, is_get = request.path, request.method == "GET"
            if path == SIGN_IN_PATH and request.method == "POST":
                return signed_in(request)
            name = path.removeprefix(f"{PAGE_PATH}/")
            if name != path and name in PUBLIC_FILES and is_get:
                return file(name, PUBLIC_FILES[name])
            is_page = path == PAGE_PATH or name != path
            if is_page and is_get and is_key(request.cookies.get(COOKIE, ""), key):
                return await handler(request)
            response = await rays_check(request, handler)
            if path == "/" and is_get and response.status == 200 and rays_page is not None:
                index = web.Response(body=rays_page, content_type="text/html", charset="utf-8")
                index.headers["Cache-Control"] = "no-store"
                return index
            if path == PAGE_PATH and is_get and response.status in REFUSED:
                return file(SIGN_IN_FILE, "text/html", response.status)
            return response

        return check

    return get_with_sign_in
