"""The permissions of each role in Redis, as rules of an ACL (Redis >= 6.2). Routers read the index and keep sealed
records, workers write their part of the index.

Owns the rules. Does not own the scripts that need them (lua/). Each command here is sent or called from a script, and
each command that is sent is here: tests/nightly/security/test_redis_roles.py tries every command of Redis.

Routers read what clients send, so they may not load scripts. Workers may: a restarted Redis has no scripts, and no
other process could load them again. A script may do no more than its caller. But the interpreter has had defects
(CVE-2025-49844) that a crafted script could use.
"""

from typing import Literal

from blockyard.proto.index.schema import key_prefix

Role = Literal["router", "worker"]

COMMANDS: dict[Role, tuple[str, ...]] = {
    "router": (
        # PING checks that Redis answers before anything starts. HELLO and AUTH are open to everybody.
        *("ping", "evalsha", "time"),
        *("hget", "hgetall", "hlen", "hmget", "zrangebyscore"),
        # The size of the index, for operators.
        *("memory|usage", "zcard", "zcount"),
        # Sealed records, answers of sessions and the log of adapters (router/sealed_records.py,
        # router/generation/answer_store.py, router/adapters/log.py). Neither command changes a key that is no string,
        # and the index has no strings.
        *("append", "getex"),
    ),
    "worker": (
        *("ping", "evalsha", "script|load", "time"),
        *("del", "exists", "hdel", "hget", "hgetall", "hmget", "hset", "hsetnx", "sadd", "smembers", "spop"),
        *("type", "zadd", "zrange", "zrangebyscore", "zrem", "zscore"),
    ),
}


def user_name(role: Role) -> str:
    return f"blockyard-{role}"


def acl_rules(role: Role, cluster: str) -> str:
    """Return the RULES of `ACL SETUSER NAME on #SHA256 RULES`: all that a role may do with a cluster's keys, and no
    more."""
    commands = (f"+{command}" for command in COMMANDS[role])
    return " ".join(("resetkeys", f"~{key_prefix(cluster)}*", "resetchannels", "-@all", *commands))
