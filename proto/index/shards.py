"""Shards of the prefix index: which of several Redis servers has a prefix, and the setting that names the servers.

All published names of a prefix descend from its first one, its root. The root chooses the server, so that a look-up
asks one server alone. Servers are known by their position in the setting: addresses, users and passwords may differ
between workers and routers. Does not own what a server stores (redis.py) or what its loss means (worker/indexing/,
router/dispatch/).
"""

import re
from hashlib import blake2b

MAX_SHARDS = 64
_BETWEEN = re.compile(r",(?=(?:rediss?(?:\+sentinel)?|unix)://)")
"""A comma before a scheme. Those between the Sentinels of one URL, or in a password, have none behind them."""


def shard_of(root: bytes, num_shards: int) -> int:
    """Return the shard of a prefix, by rendezvous hashing: the one with the highest hash of root and position.

    Of n + 1 servers, the last one takes an (n + 1)th of the prefixes from each of the others. No other prefix moves.
    """
    if num_shards == 1:
        return 0
    return max(range(num_shards), key=lambda shard: blake2b(root, digest_size=8, salt=b"%d" % shard).digest())


def split_urls(setting: str) -> tuple[str, ...]:
    """Return the URLs of a setting, which has commas between them."""
    return tuple(_BETWEEN.split(setting))


def shard_name(shard: int, num_shards: int) -> str:
    """Return a server's name for operators. It has no address and no password."""
    return f"shard {shard + 1} of {num_shards}"


def index_title(shard: int, num_shards: int) -> str:
    """Return how log lines name the part of the index on one server."""
    return "the prefix index" if num_shards == 1 else f"{shard_name(shard, num_shards)} of the prefix index"
