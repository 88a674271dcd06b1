"""Checks of a Redis that the operator names, before anything starts: its URL, its version and its content.

Owns these checks, for `up`, its dry run and `doctor`, and the claim by which an `up` holds its cluster's name there.
Does not own a private Redis (machine/redis_server.py). A URL may hold a password, so messages show it through `masked`.
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
from blockyard.deploy.machine.redis_versions import (
    OLDEST,
    ServerVersion,
    is_in_cluster_mode,
    version_of_reply,
)
from blockyard.deploy.settings.setting import masked
from blockyard.proto.index.contract import ErrorKind, PrefixIndexError, WorkerRecord
from blockyard.proto.index.redis import RedisPrefixIndex, check_urls, connect
from blockyard.proto.index.shards import split_urls
from click.core import ParameterSource

if TYPE_CHECKING:
    from blockyard.deploy.settings.wanted_cluster import UpOptions

LOOK_SECONDS = 3.0
CLAIM_SECONDS = 120.0
"""Lease of the claim by which an `up` holds its cluster's name.

After that `up` is killed, another one of this name is refused for at most this time."""
RENEW_SECONDS = 20.0


CLUSTER_MODE = (
    "it runs in Cluster mode (cluster-enabled yes), in which the index does not work. Name one server without it, the "
    "Sentinels of several (redis+sentinel://), or several URLs with commas between, which share the prefixes"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Answer of a Redis server to one ping, as the user that the URL names."""

    version: ServerVersion | None = None
    problem: str = ""
    """Reason why it did not answer PONG; empty if it did."""
    is_refusal: bool = False
    """Whether the server runs and refuses this user, or cannot hold an index, so that waiting does not help."""


def look(url: str) -> Look:
    """Ping a Redis server once, and return its version or the problem.

    The version comes from HELLO, which every user may call.
    """
    try:
        return asyncio.run(_look(url))
    except (redis.AuthenticationError, redis.exceptions.NoPermissionError):
        return Look(problem="it refuses the user or the password", is_refusal=True)
    except (redis.RedisError, OSError, ValueError) as error:
        # The error's own text may quote the URL.
        return Look(problem=f"it does not answer ({type(error).__name__})")


async def _look(url: str) -> Look:
    async with connect(url, timeout_seconds=LOOK_SECONDS) as client:
        ask: Any = client.execute_command
        await ask("PING")
        greeting = await ask("HELLO")
        if is_in_cluster_mode(greeting):
            return Look(problem=CLUSTER_MODE, is_refusal=True)
        return Look(version=version_of_reply(greeting))


def check(options: "UpOptions") -> list[str]:
    """Check the operator's Redis as workers and as routers reach it, and return warnings.

    Raise ValueError if it refuses a user or the commands of workers, is too old, runs in Cluster mode, or has a cluster
    of this name.
    """
    given = options.given_redis_url
    if given is None:
        return []
    warnings: dict[str, None] = {}
    of_workers, of_routers = split_urls(given), split_urls(options.router_redis_url or given)
    for users, own_url in (
        *(("workers", url) for url in of_workers),
        *(("routers", url) for url in of_routers),
    ):
        looked = look(own_url)
        if looked.is_refusal:
            raise ValueError(f"the {users}' Redis, {masked(own_url)}: {looked.problem}")
        if looked.problem:
            text = f"the {users}' Redis, {masked(own_url)}: {looked.problem}"
            warnings[f"{text}. Until it answers, the cluster serves without a prefix index"] = None
        elif (version := looked.version) is not None:
            if version.version < OLDEST:
                raise ValueError(
                    f"the {users}' Redis, {masked(own_url)}, is {version}: at least 6.2 is needed"
                )
            warnings |= {version.warning: None} if version.warning else {}
    for shard, url in enumerate(of_workers):
        _refuse_name_in_use(url, options.cluster, shard)
    return list(warnings)


def _refuse_name_in_use(url: str, cluster: str, shard: int) -> None:
    """Raise ValueError if a worker is registered under this cluster name, or if Redis refuses the commands of workers.

    Such a worker belongs to another cluster, which has another secret.
    """
    try:
        others = asyncio.run(_directory(url, cluster, shard))
    except PrefixIndexError as error:
        if error.kind is ErrorKind.DENIED:
            text = f"the workers' Redis, {masked(url)}, refuses the commands of workers: SECURITY.md lists the rights"
            raise ValueError(text) from None
        return
    if others:
        raise ValueError(
            f"{masked(url)} has a cluster called {cluster!r} already: its worker {others[0].worker_id} at "
            f"{others[0].address} renewed its lease seconds ago. Choose another name (--cluster), or take that cluster "
            "down. If it has just ended, try again in some seconds"
        )


@contextlib.contextmanager
def claimed(options: "UpOptions") -> Iterator[Callable[[], None]]:
    """Hold the cluster's name on the workers' first Redis, so that no other `up` of this name begins.

    Yield a function that renews the claim and must be called regularly. Raise ValueError if another `up` is under
    way. Without a given Redis, or on one that does not answer, nothing is claimed.
    """
    given, holder, renewed_at = options.given_redis_url, secrets.token_hex(8), -RENEW_SECONDS
    if given is None:
        yield lambda: None
        return
    url = split_urls(given)[0]

    def keep() -> None:
        nonlocal renewed_at
        if time.monotonic() < renewed_at + RENEW_SECONDS:
            return
        renewed_at = time.monotonic()
        # If Redis does not answer now, the start fails by itself where it uses Redis.
        with contextlib.suppress(PrefixIndexError):
            if not asyncio.run(_claim(url, options.cluster, holder)):
                raise ValueError(
                    f"another `up` of cluster {options.cluster!r} is under way on {masked(url)}: choose another name "
                    f"(--cluster). If that one was killed, try again in {CLAIM_SECONDS / 60:.0f} minutes"
                )

    keep()
    try:
        yield keep
    finally:
        with contextlib.suppress(PrefixIndexError):  # The claim expires after CLAIM_SECONDS.
            asyncio.run(_unclaim(url, options.cluster, holder))


async def _claim(url: str, cluster: str, holder: str) -> bool:
    async with connect(url, timeout_seconds=LOOK_SECONDS) as client:
        return await RedisPrefixIndex(client, cluster).claim(holder, lease_seconds=CLAIM_SECONDS)


async def _unclaim(url: str, cluster: str, holder: str) -> None:
    async with connect(url, timeout_seconds=LOOK_SECONDS) as client:
        await RedisPrefixIndex(client, cluster).unclaim(holder)


async def _directory(url: str, cluster: str, shard: int) -> list[WorkerRecord]:
    async with connect(url, timeout_seconds=LOOK_SECONDS) as client:
        return await RedisPrefixIndex(client, cluster, shard=shard).directory()


def checked_redis_url(variable: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return a click callback for an option that takes Redis URLs, and that the variable `variable` sets too.

    The callback raises BadParameter for a text that is no list of them, and for a password on the command line.
    """

    def callback(context: click.Context, parameter: click.Parameter, url: Any) -> Any:
        if url is None:
            return None
        try:
            check_urls(url)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
        source = context.get_parameter_source(parameter.name or "")
        if source is ParameterSource.COMMANDLINE and masked(url) != url:
            raise click.BadParameter(
                "a password does not belong on the command line, which every user of this machine can read: set "
                f"{variable} instead"
            )
        return url

    return callback
