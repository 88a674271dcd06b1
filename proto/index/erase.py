"""Erases one index in Redis, for a model that its cluster no longer serves.

Only for an index that no worker writes to any more: a berth that still lives would go on without its keys. Keys are
deleted in small slices, so that Redis answers others between them.
"""

import logging
from collections.abc import Iterator
from itertools import chain

from blockyard.proto.index.contract import MAX_BERTHS
from blockyard.proto.index.redis import connect
from blockyard.proto.index.schema import NUM_BUCKETS, key_prefix
from blockyard.proto.index.shards import index_title, split_urls
from redis.asyncio import Redis
from redis.exceptions import RedisError

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 2.0
SLICE_KEYS = 256
_SINGLE = ("leases", "identities", "names", "free", "condemned", "state")


async def erase_index(urls: str, cluster: str, *, model: str) -> None:
    """Delete all keys of a model's index on each of these servers. What a server does not answer to stays there."""
    for shard, url in enumerate(split_urls(urls)):
        client = connect(url, timeout_seconds=TIMEOUT_SECONDS)
        try:
            await erase(client, cluster, shard=shard, model=model)
        except (RedisError, OSError, TimeoutError, ValueError) as error:
            title = index_title(shard, len(split_urls(urls)))
            logger.warning("keys of model %s stay in %s: %s", model, title, type(error).__name__)
        finally:
            await client.aclose()


async def erase(client: Redis, cluster: str, *, shard: int = 0, model: str = "") -> int:
    """Delete all keys of one index on one server, and return how many there were. A running claim stays.

    Raises the client's exceptions.
    """
    prefix = key_prefix(cluster, shard, model=model)
    highest = await client.hget(f"{prefix}state", "next")
    num_berths = min(int(highest or 0), MAX_BERTHS)
    keys = list(_keys(prefix, num_berths))
    slices = (keys[at : at + SLICE_KEYS] for at in range(0, len(keys), SLICE_KEYS))
    return sum([await client.delete(*some) for some in slices])


def _keys(prefix: str, num_berths: int) -> Iterator[str]:
    buckets = (f"{prefix}b:{number:03x}" for number in range(NUM_BUCKETS))
    berths = (f"{prefix}berth:{number}" for number in range(num_berths + 1))
    return chain(buckets, berths, (prefix + name for name in _SINGLE))
