"""A Redis that the operator names: what is wrong with its URL, with it, and with what is in it, before anything starts.

Owns these checks, for `up`, its dry run and `doctor`. Does not own a private Redis (machine/redis_server.py). A URL
holds a password: no message here has more of it than `masked` leaves.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
import redis
from blockyard.deploy.machine.redis_versions import OLDEST, ServerVersion, version_of_reply
from blockyard.deploy.settings.setting import masked
from blockyard.proto.index.contract import ErrorKind, PrefixIndexError, WorkerRecord
from blockyard.proto.index.redis import RedisPrefixIndex, check_url, connect
from click.core import ParameterSource

if TYPE_CHECKING:
    from blockyard.deploy.settings.wanted_cluster import UpOptions

LOOK_SECONDS = 3.0
CLAIM_SECONDS = 120.0
"""For so long the name of an `up` that was killed is refused; and so long an `up` may pause between two renewals."""
RENEW_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a server said to whoever this URL logs in."""

    version: ServerVersion | None = None
    problem: str = ""
    """Why it did not say PONG; empty if it did."""
    is_refusal: bool = False
    """It is there, and does not let this user in: waiting helps nothing."""


def look(url: str) -> Look:
    """Pings it, once. HELLO says the version to users who may not ask for it otherwise."""
    try:
        return asyncio.run(_look(url))
    except (redis.AuthenticationError, redis.exceptions.NoPermissionError):
        return Look(problem="it refuses the user or the password", is_refusal=True)
    except (redis.RedisError, OSError, ValueError) as error:
        # Never the error's own text: it may quote the URL.
        return Look(problem=f"it does not answer ({type(error).__name__})")


async def _look(url: str) -> Look:
    async with connect(url, timeout_seconds=LOOK_SECONDS) as client:
        ask: Any = client.execute_command
        await ask("PING")
        return Look(version=version_of_reply(await ask("HELLO")))


def check(options: "UpOptions") -> list[str]:
    """What to warn of. Raises ValueError for a Redis that no waiting makes fit, and for a name that is in use there."""
    url = options.given_redis_url
    if url is None:
        return []
    warnings: dict[str, None] = {}
    for whose, own_url in (("workers", url), ("routers", options.router_redis_url or url)):
        looked = look(own_url)
        if looked.is_refusal:
            raise ValueError(f"the {whose}' Redis, {masked(own_url)}: {looked.problem}")
        if looked.problem:
            text = f"the {whose}' Redis, {masked(own_url)}: {looked.problem}"
            warnings[f"{text}. Until it does the cluster serves without a prefix index"] = None
        elif (version := looked.version) is not None:
            if version.version < OLDEST:
                raise ValueError(
                    f"the {whose}' Redis, {masked(own_url)}, is {version}: at least 6.2 is needed"
                )
            warnings |= {version.told: None} if version.told else {}
    _refuse_name_in_use(url, options.cluster)
    return list(warnings)


def _refuse_name_in_use(url: str, cluster: str) -> None:
    """A cluster that comes up has no worker yet: whoever stands under its name is of another, with another secret."""
    try:
        others = asyncio.run(_directory(url, cluster))
    except PrefixIndexError as error:
        if error.kind is ErrorKind.DENIED:
            text = f"the workers' Redis, {masked(url)}, refuses what workers do: SECURITY.md has the rights"
            raise ValueError(text) from None
        return
    if others:
        raise ValueError(
            f"{masked(url)} has a cluster called {cluster!r} already: its worker {others[0].worker_id} at "
            f"{others[0].address} was heard of within seconds. Name this one otherwise (--cluster), or take that one "
            "down; if it has just ended, try again in some seconds"
        )


@contextlib.contextmanager
def claimed(options: "UpOptions") -> Iterator[Callable[[], None]]:
    """Inside, no other `up` of this name begins on the workers' Redis, as long as what this yields is called now and
    then. Raises ValueError where another is under way. On a Redis that does not answer nothing is claimed."""
    url, holder, renewed_at = options.given_redis_url, secrets.token_hex(8), -RENEW_SECONDS
    if url is None:
        yield lambda: None
        return

    def keep() -> None:
        nonlocal renewed_at
        if time.monotonic() < renewed_at + RENEW_SECONDS:
            return
        renewed_at = time.monotonic()
        with contextlib.suppress(PrefixIndexError):
            if not asyncio.run(_claim(url, options.cluster, holder)):
                raise ValueError(
                    f"another `up` of cluster {options.cluster!r} is under way on {masked(url)}: name this one "
                    f"otherwise (--cluster). If that one was killed, try again in {CLAIM_SECONDS / 60:.0f} minutes"
                )

    keep()
    try:
        yield keep
    finally:
        with contextlib.suppress(PrefixIndexError):
            asyncio.run(_unclaim(url, options.cluster, holder))


async def _claim(url: str, cluster: str, holder: str) -> bool:
    async with connect(url, timeout_seconds=LOOK_SECONDS) as client:
        return await RedisPrefixIndex(client, cluster).claim(holder, lease_seconds=CLAIM_SECONDS)


async def _unclaim(url: str, cluster: str, holder: str) -> None:
    async with connect(url, timeout_seconds=LOOK_SECONDS) as client:
        await RedisPrefixIndex(client, cluster).unclaim(holder)


async def _directory(url: str, cluster: str) -> list[WorkerRecord]:
    async with connect(url, timeout_seconds=LOOK_SECONDS) as client:
        return await RedisPrefixIndex(client, cluster).directory()


def checked_redis_url(variable: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback for an option that `variable` gives too: a bad parameter for what is no Redis URL, and for a password
    on the command line."""

    def callback(context: click.Context, parameter: click.Parameter, url: Any) -> Any:
        if url is None:
            return None
        try:
            check_url(url)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
        source = context.get_parameter_source(parameter.name or "")
        if source is ParameterSource.COMMANDLINE and masked(url) != url:
            raise click.BadParameter(
                "a password does not belong on the command line, where everybody on this machine can read it: set "
                f"{variable} instead"
            )
        return url

    return callback
