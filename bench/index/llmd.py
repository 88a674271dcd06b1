"""llm-d's prefix index in Redis, rewritten in Python: the peer of bench/index/__main__.py.

Layout and round trips are those of `pkg/kvcache/kvblock/redis.go` and `index.go` in llm-d/llm-d-kv-cache at commit
02bff241f63655fc7614c9f1877bb12a58638272:

    <block>           HASH    block = a 64-bit hash in decimal; field = `pod@tier`, value empty
    engine:<block>    STRING  the engine's own hash of the block -> the key above, so that evictions find it

Look-up: one pipeline with an HKEYS for each block, up to the first block that no pod holds. Add: one pipeline of SET
and HSET for each block. Evict, block by block: GET, HDEL, then a script that drops the engine's key with the last pod.
Entries of a dead pod are not removed. (In llm-d/llm-d-kv-cache-manager at 092ce2799c89055c8e771f100457c461909541f2, the
value was a time stamp and there was no `engine:` key; the rest was the same. Neither stores JSON.)
"""

from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

_PRUNE_ENGINE_KEY = """
if redis.call('HLEN', KEYS[1]) == 0 then redis.call('DEL', KEYS[2]) return 1 end
return 0
"""


def pod_entry(worker: int) -> str:
    """Return a pod's address, as llm-d's router identifies it, and its tier."""
    return f"10.0.{worker // 250}.{worker % 250 + 1}:8000@gpu"


class LlmdIndex:
    def __init__(self, client: Redis) -> None:
        self._client = client
        self._prune = client.register_script(_PRUNE_ENGINE_KEY)

    async def add(self, names: Sequence[bytes], entry: str, *, with_engine_keys: bool = True) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            if with_engine_keys:
                pipeline.set(_engine_key(name), _key(name))
            pipeline.hset(_key(name), entry, "")
        await pipeline.execute()

    async def lookup(self, names: Sequence[bytes]) -> dict[bytes, int]:
        """Return the number of leading blocks that each pod holds."""
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            pipeline.hkeys(_key(name))
        depths: dict[bytes, int] = {}
        for depth, entries in enumerate(await pipeline.execute()):
            pods = [entry.partition(b"@")[0] for entry in entries]
            goes_on = [pod for pod in pods if depths.get(pod, 0) == depth]
            if not goes_on:
                break
            depths.update(dict.fromkeys(goes_on, depth + 1))
        return depths

    async def evict(self, name: bytes, entry: str) -> None:
        request_key: Any = await self._client.get(_engine_key(name))
        pipeline = self._client.pipeline(transaction=False)
        pipeline.hdel(request_key.decode(), entry)
        await pipeline.execute()
        await self._prune(keys=[request_key, _engine_key(name)])


def _key(name: bytes) -> str:
    return str(int.from_bytes(name[:8], "big"))


def _engine_key(name: bytes) -> str:
    """Return the engine's key. Engines have their own hash, for which any other 64 bits will do."""
    return f"engine:{int.from_bytes(name[8:16], 'big')}"
