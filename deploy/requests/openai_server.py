"""A client for any server that speaks OpenAI's HTTP API: ours, vLLM's, or another one.

Owns which failures there are, in words. Does not own what is asked (bench/targets.py). aiohttp speaks HTTP, so that a
machine that calls such servers needs the extra [serve].
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
    """A call failed. `str(error)` is a sentence, `reason` a word for programs."""

    def __init__(self, message: str, *, reason: str, status: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.status = status
        """Of HTTP; None where there was no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUrl:
    """Where a server is. `path` is what stands before /v1."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{text!r} is no URL: {error}") from None
        if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
            raise ValueError(f"a server's URL is http://HOST:PORT or https://HOST, not {text!r}")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError(
                f"a server's URL has neither a user nor a query: its key comes by {API_KEY_VARIABLE}"
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
    """Raises ValueError for files that cannot be used."""
    given = options or TlsOptions()
    try:
        context = ssl.create_default_context(cafile=given.ca)
        if given.cert is not None:
            context.load_cert_chain(given.cert, given.key)
    except OSError as error:
        raise ValueError(f"the TLS files cannot be used: {error.strerror or error}") from None
    return context


class OpenAIServer:
    """Belongs to one event loop. Every call raises CallFailed."""

    def __init__(
        self,
        url: ServerUrl,
        *,
        key: str | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_seconds: float = 600.0,
        allow_plaintext_key: bool = False,
    ) -> None:
        """Raises ValueError for a key that would go over a network in plaintext."""
        if key and url.scheme == "http" and not is_loopback(url.host) and not allow_plaintext_key:
            raise ValueError(
                f"the key would go to {url} in plaintext, for anybody on the way to read: use https, or say that you "
                f"want it so (--plaintext-token), or unset {API_KEY_VARIABLE}"
            )
        self.url = url
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._tls = tls
        self._timeout_seconds = timeout_seconds
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Raises CallFailed where aiohttp is not installed."""
        try:
            import aiohttp
        except ModuleNotFoundError:
            told = "calls over HTTP need the packages of a server: pip install '.[serve]' in a clone"
            raise CallFailed(told, reason="NOT_INSTALLED") from None
        # The caller bounds how many calls there are at once.
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
        """List the models that the server offers, as it describes them."""
        listed = await self.get("/v1/models")
        data = listed.get("data") if isinstance(listed, dict) else None
        models = [model for model in data if isinstance(model, dict)] if isinstance(data, list) else []
        if not models:
            raise CallFailed(f"{self.url} lists no model at /v1/models", reason="NO_MODEL")
        return models

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Make a call whose answer is one JSON document."""
        async with self._calling("POST", path, body) as answer:
            return _json(await answer.read(), self.url)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Make a call whose answer is a stream, and yield its events."""
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
                raise CallFailed(f"{self.url} ended a stream in the middle", reason="STREAM_CUT_OFF")

    @contextlib.asynccontextmanager
    async def _calling(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Make a call and yield the answer unless it was refused. The whole call has `timeout_seconds`."""
        import aiohttp

        assert self._session is not None, "it was not entered"
        try:
            async with self._session.request(method, f"{self.url}{path}", json=body) as answer:
                if not answer.ok:
                    raise _refusal(answer.status, await answer.read(), self.url)
                yield answer
        except TimeoutError:
            told = f"gave up {self.url} after {self._timeout_seconds:g} s"
            raise CallFailed(told, reason="DEADLINE_EXCEEDED") from None
        except aiohttp.ClientSSLError as error:
            raise CallFailed(f"no TLS with {self.url}: {error.os_error}", reason="NO_TLS") from None
        except aiohttp.ClientConnectorError as error:
            told = f"no server answers at {self.url}: {_why_not_connected(error.os_error)}"
            raise CallFailed(told, reason="NO_CONNECTION") from None
        except aiohttp.ClientResponseError:
            raise CallFailed(
                f"what answers at {self.url} speaks no HTTP/1.1: is it a port of gRPC, or of TLS?",
                reason="NOT_HTTP",
            ) from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            told = f"{self.url} broke off in the middle of a call"
            raise CallFailed(told, reason="CONNECTION_LOST") from None


def _why_not_connected(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "no host of this name is known"
    return os.strerror(error.errno) if error.errno else str(error)


def _json(text: bytes, url: ServerUrl) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise CallFailed(f"{url} answered no JSON", reason="NO_JSON") from None


def _event(data: bytes, url: ServerUrl) -> dict[str, Any]:
    event = _json(data, url)
    if not isinstance(event, dict):
        raise CallFailed(f"{url} sent an event that is no object", reason="NO_JSON")
    if event.get("error"):
        raise _told_error(event["error"], None, url)
    return event


def _refusal(status: int, text: bytes, url: ServerUrl) -> CallFailed:
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    error = document.get("error", document) if isinstance(document, dict) else None
    return _told_error(error, status, url)


def _told_error(error: Any, status: int | None, url: ServerUrl) -> CallFailed:
    """Read OpenAI's form of an error: an object with `message`, `code` and `type`."""
    given = error if isinstance(error, dict) else {"message": error} if isinstance(error, str) else {}
    words = [given.get(name) for name in ("code", "type")]
    word = next((word for word in words if isinstance(word, str) and word and not word.isdigit()), "")
    message = str(given.get("message") or given.get("detail") or "")
    told = message or (f"{url} answered HTTP {status}" if status is not None else f"{url} ended a stream")
    reason = word.upper() or (f"HTTP_{status}" if status is not None else "STREAM_FAILED")
    return CallFailed(told, reason=reason, status=status)
