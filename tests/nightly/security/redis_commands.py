"""Commands of a Redis server, with arguments to try each, and whether a user may call one."""

from dataclasses import dataclass
from typing import Any

import redis
from blockyard.proto.index.acl import Role
from blockyard.proto.index.schema import key_prefix
from redis.backoff import NoBackoff
from redis.retry import Retry

CLUSTER = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of the server. Each subcommand is a command of its own."""

    name: str
    num_arguments: int
    is_open_to_all: bool
    """True for a command that a client may call before it logs in. No ACL removes it."""


def commands_of(admin: "redis.Redis") -> list[Command]:
    found = []
    for name, arity, flags, *more in raw(admin, "COMMAND"):
        # Redis 6.2 has the same subcommands, and does not list them.
        subcommands = (
            more[6] if len(more) > 6 else [[f"{text(name)}|{s}", -2, flags] for s in OLD.get(text(name), ())]
        )
        for called, least, its_flags, *_ in subcommands or [(name, arity, flags)]:
            is_open = "no_auth" in {text(flag) for flag in its_flags}
            words = text(called).split("|")
            num_arguments = abs(least) - len(words)
            found.append(Command(name=text(called), num_arguments=num_arguments, is_open_to_all=is_open))
    return found


OLD = {
    name: tuple(words.split())
    for name, words in {
        "acl": "list setuser getuser deluser users cat genpass whoami log load save",
        "client": "list kill id info getname setname pause unblock tracking no-evict",
        "cluster": "info nodes slots keyslot reset failover",
        "command": "count info getkeys",
        "config": "get set rewrite resetstat",
        "debug": "sleep object segfault reload",
        "latency": "doctor history latest reset",
        "memory": "usage stats doctor purge malloc-stats",
        "module": "list load unload",
        "object": "encoding freq idletime refcount",
        "pubsub": "channels numpat numsub",
        "script": "load exists flush kill debug",
        "slowlog": "get len reset",
        "xgroup": "create destroy setid delconsumer createconsumer",
        "xinfo": "stream groups consumers",
    }.items()
}
"""Subcommands of Redis 6.2, by command."""
REFUSALS = (
    # Texts of Redis 6.2, and of later ones.
    *("has no permissions to run the", "no permissions to run"),
    # Texts for all users, before any user's rights are checked.
    *("enable-debug-command", "enable-module-command"),
)


def raw(client: "redis.Redis", *command: str) -> Any:
    """Return the server's raw answer: the library parses some answers."""
    connection = client.connection_pool.get_connection()
    try:
        connection.send_command(*command)
        return connection.read_response()
    finally:
        client.connection_pool.release(connection)


def arguments_of(command: Command) -> list[str]:
    key = f"{key_prefix(CLUSTER)}x"
    return [*command.name.split("|"), *[key] * command.num_arguments]


def is_permitted(url: str, command: Command) -> bool:
    """Try a command on a connection of its own: some commands change the connection, or end it."""
    with redis.Redis.from_url(url, socket_timeout=5.0, retry=Retry(NoBackoff(), 0)) as user:
        try:
            raw(user, *arguments_of(command))
        except redis.RedisError as error:
            return not any(refusal in str(error) for refusal in REFUSALS)
    return True


def is_permitted_by_dry_run(admin: "redis.Redis", role: Role, command: Command) -> bool:
    try:
        said = text(raw(admin, "ACL", "DRYRUN", f"blockyard-{role}", *arguments_of(command)))
    except redis.ResponseError as error:
        if "unknown subcommand" in str(error).lower():
            return False
        said = str(error)
    return "no permissions to run" not in said


def text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
