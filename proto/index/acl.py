"""What each role may do in Redis, as rules of an ACL (Redis >= 6.2): routers read the index, workers write their part.

Owns the rules; the scripts that need them are in lua/. Each command here is sent or
called from a script, and each that is sent is here: tests/security/test_redis_roles.py tries every command there is.

Routers, which read what clients send, may not load scripts. Workers may: a Redis that was restarted has none, and
nobody with more rights than a worker is there to load them again. A script may do no more than its caller, but the
interpreter has had defects (CVE-2025-49844), and a script made for it could use them.
"""

from typing import Literal

from blockyard.proto.index.schema import key_prefix

Role = Literal["router", "worker"]

COMMANDS: dict[Role, tuple[str, ...]] = {
    "router": (
        # PING asks whether it is there at all, before anything starts. HELLO and AUTH are open to everybody.
        *("ping", "evalsha", "time"),
        *("hget", "hgetall", "hlen", "hmget", "zrangebyscore"),
        # How large the index is, for operators.
        *("memory|usage", "zcard", "zcount"),
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
    """All that a user of this role needs, and no more, for `ACL SETUSER NAME on #SHA256 RULES`."""
    commands = (f"+{command}" for command in COMMANDS[role])
    return " ".join(("resetkeys", f"~{key_prefix(cluster)}*", "resetchannels", "-@all", *commands))
