"""HTTP client for any server of OpenAI's API: Blockyard, vLLM, or another one.

Owns the kinds of failures and their messages. Does not own the bodies of requests (bench/targets.py). Calls need
aiohttp, which is part of the extra [serve].
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from blockyard.proto.security.loopback import is_loopback
from blockyard.router.client import TlsOptions

if TYPE_CHECKING:
    import aiohttp

API_KEY_VARIABLE = "OPENAI_API_KEY"
_DEFAULT_PORTS = {"http": 80, "https": 443}


class CallFailed(RuntimeError):
    """A call failed. `str(error)` is a message for people, `reason` a constant word for programs."""

    def __init__(self, message: str, *, reason: str, status: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.status = status
        """HTTP status; None if there was no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUrl:
    """Parsed URL of a server. `path` is the part before /v1."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a URL, with or without /v1 at its end. Raise ValueError if it is invalid."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{text!r} is not a URL: {error}") from None
        if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
            raise ValueError(f"a server's URL is http://HOST:PORT or https://HOST, not {text!r}")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError(
                f"a server's URL must have no user, query or fragment: set its key in {API_KEY_VARIABLE}"
            )
        path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(
            scheme=parts.scheme,
            host=parts.hostname,
            port=_DEFAULT_PORTS[parts.scheme] if port is None else port,
            path=path,
        )

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


def tls_context(options: TlsOptions | None) -> ssl.SSLContext:
    """Make a TLS context for calls. Raise ValueError for files that cannot be used."""
    given = options or TlsOptions()
    try:
        context = ssl.create_default_context(cafile=given.ca)
        if given.cert is not None:
            context.load_cert_chain(given.cert, given.key)
    except OSError as error:
        raise ValueError(f"the TLS files cannot be used: {error.strerror or error}") from None
    return context


class OpenAIServer:
    """Client of one server. Belongs to one event loop. Every call may raise CallFailed."""

    def __init__(
        self,
        url: ServerUrl,
        *,
        key: str | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_seconds: float = 600.0,
        allow_plaintext_key: bool = False,
    ) -> None:
        """Raise ValueError for a key that would be sent over a network in plaintext."""
        if key and url.scheme == "http" and not is_loopback(url.host) and not allow_plaintext_key:
            raise ValueError(
                f"the key would be sent to {url} in plaintext, which anybody on the network can read: use https, "
                f"unset {API_KEY_VARIABLE}, or allow it with --plaintext-token"
            )
        self.url = url
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._tls = tls
        self._timeout_seconds = timeout_seconds
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Open the session. Raise CallFailed if aiohttp is not installed."""
        try:
            import aiohttp
        except ModuleNotFoundError:
            message = "calls over HTTP need the packages of a server: pip install '.[serve]' in a clone"
            raise CallFailed(message, reason="NOT_INSTALLED") from None
        # The caller limits the number of concurrent calls.
        connector = aiohttp.TCPConnector(limit=0, ssl=True if self._tls is None else self._tls)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout_seconds),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str) -> Any:
        """Return the JSON document at a path."""
        async with self._calling("GET", path, None) as answer:
            return _json(await answer.read(), self.url)

    async def models(self) -> list[dict[str, Any]]:
        """Return the server's descriptions of its models. Raise CallFailed if it lists none."""
        listed = await self.get("/v1/models")
        data = listed.get("data") if isinstance(listed, dict) else None
        models = [model for model in data if isinstance(model, dict)] if isinstance(data, list) else []
        if not models:
            raise CallFailed(f"{self.url} lists no model at /v1/models", reason="NO_MODEL")
        return models

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Make a call and return its answer, one JSON document."""
        async with self._calling("POST", path, body) as answer:
            return _json(await answer.read(), self.url)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Make a call whose answer is a stream, and yield its events. Raise CallFailed if it ends before [DONE]."""
        async with self._calling("POST", path, body) as answer:
            rest, is_done = b"", False
            async for piece in answer.content.iter_any():
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    data = line.strip().removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                    if data == b"[DONE]":
                        is_done = True
                    elif data:
                        yield _event(data, self.url)
            if not is_done:
                raise CallFailed(f"{self.url} ended a stream before [DONE]", reason="STREAM_CUT_OFF")

    @contextlib.asynccontextmanager
    async def _calling(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Make a call and yield its answer. Raise CallFailed. `timeout_seconds` limits the whole call."""
        import aiohttp

        assert self._session is not None, "call this inside `async with`"
        try:
            async with self._session.request(method, f"{self.url}{path}", json=body) as answer:
                if not answer.ok:
                    raise _refusal(answer.status, await answer.read(), self.url)
                yield answer
        except TimeoutError:
            message = f"{self.url} did not answer within {self._timeout_seconds:g} s"
            raise CallFailed(message, reason="DEADLINE_EXCEEDED") from None
        except aiohttp.ClientSSLError as error:
            raise CallFailed(f"TLS with {self.url} failed: {error.os_error}", reason="NO_TLS") from None
        except aiohttp.ClientConnectorError as error:
            message = f"no server answers at {self.url}: {_why_not_connected(error.os_error)}"
            raise CallFailed(message, reason="NO_CONNECTION") from None
        except aiohttp.ClientResponseError:
            raise CallFailed(
                f"the server at {self.url} does not speak HTTP/1.1: is it a gRPC or a TLS port?",
                reason="NOT_HTTP",
            ) from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            message = f"{self.url} closed the connection during a call"
            raise CallFailed(message, reason="CONNECTION_LOST") from None


def _why_not_connected(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "no host of this name is known"
    return os.strerror(error.errno) if error.errno else str(error)


def _json(text: bytes, url: ServerUrl) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise CallFailed(f"the answer of {url} is not JSON", reason="NO_JSON") from None


def _event(data: bytes, url: ServerUrl) -> dict[str, Any]:
    event = _json(data, url)
    if not isinstance(event, dict):
        raise CallFailed(f"{url} sent an event that is not a JSON object", reason="NO_JSON")
    if event.get("error"):
        raise _server_error(event["error"], None, url)
    return event


def _refusal(status: int, text: bytes, url: ServerUrl) -> CallFailed:
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    error = document.get("error", document) if isinstance(document, dict) else None
    return _server_error(error, status, url)


def _server_error(error: Any, status: int | None, url: ServerUrl) -> CallFailed:
    """Return an exception for an error in OpenAI's form: an object with `message`, `code` and `type`."""
    given = error if isinstance(error, dict) else {"message": error} if isinstance(error, str) else {}
    words = [given.get(name) for name in ("code", "type")]
    word = next((word for word in words if isinstance(word, str) and word and not word.isdigit()), "")
    message = str(given.get("message") or given.get("detail") or "")
    message = message or (
        f"{url} answered HTTP {status}" if status is not None else f"{url} ended a stream with an error"
    )
    reason = word.upper() or (f"HTTP_{status}" if status is not None else "STREAM_FAILED")
    return CallFailed(message, reason=reason, status=status)
