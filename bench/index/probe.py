"""Probe beside a load: PINGs and look-ups from another process, which bench/index/writes.py starts.

Reads Redis's URL from the first line of stdin, prints `ready`, and runs until stdin ends. Then it prints the times, in
microseconds, as JSON.
"""

import asyncio
import json
import sys
import time

from blockyard.proto.index.redis import RedisPrefixIndex, connect

from bench.index.load import CACHED_BLOCKS, CLUSTER, PROBE_SEED, make_names, prompt_of

PAUSE_SECONDS = 0.002


async def probe(url: str, ended: asyncio.Event) -> dict[str, list[float]]:
    prompt = prompt_of(make_names(PROBE_SEED, CACHED_BLOCKS), PROBE_SEED)
    pings: list[float] = []
    lookups: list[float] = []
    async with connect(url, timeout_seconds=10.0) as client:
        index = RedisPrefixIndex(client, CLUSTER)
        while not ended.is_set():
            started = time.perf_counter()
            await client.ping()
            pinged = time.perf_counter()
            holders = await index.lookup(prompt)
            lookups.append(1e6 * (time.perf_counter() - pinged))
            pings.append(1e6 * (pinged - started))
            assert [holder.depth for holder in holders] == [CACHED_BLOCKS]
            await asyncio.sleep(PAUSE_SECONDS)
    return {"ping": pings, "lookup": lookups}


async def main() -> None:
    url = sys.stdin.readline().strip()
    ended = asyncio.Event()
    print("ready", flush=True)

    async def wait_for_the_end() -> None:
        await asyncio.to_thread(sys.stdin.read)
        ended.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(wait_for_the_end())
        times = group.create_task(probe(url, ended))
    print(json.dumps(times.result()))


if __name__ == "__main__":
    asyncio.run(main())
