"""What each role may do in Redis, as rules of an ACL (Redis >= 6.2): routers read the index, workers write their part.

Both may load scripts, which Redis lets do no more than their caller may. Neither may see another key or configure the
server. Owns the rules; the scripts that need them are in index_scripts.py and index_walks.py.
"""

from typing import Literal

from blockyard.proto.index_schema import key_prefix

Role = Literal["router", "worker"]

_READS = (
    *("hget", "hgetall", "hlen", "hmget", "zrangebyscore", "zscore"),
    # How large the index is, for operators.
    *("memory|usage", "zcard", "zcount"),
)
_WRITES = (
    "del",
    "exists",
    "hdel",
    "hset",
    "hsetnx",
    "sadd",
    "smembers",
    "spop",
    "type",
    "zadd",
    "zrange",
    "zrem",
)
_CALLS = ("evalsha", "script|load", "time", "hello", "ping")


def user_name(role: Role) -> str:
    return f"blockyard-{role}"


def acl_rules(role: Role, cluster: str) -> str:
    """All that a user of this role needs, and no more, for `ACL SETUSER NAME on #SHA256 RULES`."""
    # A worker looks whether Redis keeps buckets compact. Setting it is for whoever runs Redis.
    more = (*_WRITES, "config|get") if role == "worker" else ()
    commands = (*_CALLS, *_READS, *more)
    return " ".join(
        ("resetkeys", f"~{key_prefix(cluster)}*", "resetchannels", "-@all", *(f"+{c}" for c in commands))
    )
