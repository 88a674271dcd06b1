"""Transfers whose bytes are cut, flipped, left out or doubled at a random place: wrong tokens must never follow.

Plaintext, so that only the transfer's own checks stand between harm and a token.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from blockyard.proto.v1.session_pb2 import PullEnd

from bench.engine.shapes import DEMO
from bench.transfer.rig import BLOCK_SIZE, Worker, options_of, two_workers

PROMPT_TOKENS = 104
BLOCKS = PROMPT_TOKENS // BLOCK_SIZE
BLOCK_BYTES = 2 * 6 * 2 * 32 * BLOCK_SIZE * 4
"""A block of the demo model in float32."""
FRAME_BYTES = 8 + BLOCK_BYTES
REPLY_BYTES = 6
OUTPUT_TOKENS = 6
CHUNK_BYTES = 65_536
AT_ONCE = 4
KINDS = ("cut", "flipped", "left out", "doubled", "reversed")


@dataclass(slots=True)
class Harm:
    """Harm to the bytes of one answer."""

    kind: str
    position: int
    bit: int
    first_wrong: int | None = None
    """Offset of the first byte that is another one than was sent, or is missing."""

    def pass_on(self, data: bytes, offset: int) -> tuple[bytes, bool]:
        """Return the bytes to pass on for these of the source, and whether the connection goes on after them."""
        index = self.position - offset
        if not 0 <= index < len(data):
            return data, True
        passed = self._changed(data, index)
        if passed != data:
            self.first_wrong = offset + _first_difference(data, passed)
        return passed, self.kind != "cut"

    def _changed(self, data: bytes, index: int) -> bytes:
        match self.kind:
            case "cut":
                return data[:index]
            case "flipped":
                return data[:index] + bytes([data[index] ^ 1 << self.bit]) + data[index + 1 :]
            case "left out":
                return data[:index] + data[index + 1 :]
            case "doubled":
                return data[: index + 1] + data[index:]
            case "reversed":
                return data[:index] + data[index:][::-1]
        raise ValueError(self.kind)

    @property
    def num_intact(self) -> float:
        """The leading blocks that were not harmed."""
        return inf if self.first_wrong is None else max(self.first_wrong - REPLY_BYTES, 0) // FRAME_BYTES


@asynccontextmanager
async def harmed(worker: Worker, harm: Harm) -> AsyncIterator[str]:
    """Yield the address of a proxy before the worker's transfer port."""
    tasks: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        host, _, port = worker.transfer_address.rpartition(":")
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        offset, goes_on = 0, True
        with suppress(OSError, asyncio.CancelledError):
            up_writer.write(await reader.read(CHUNK_BYTES))
            while goes_on and (data := await up_reader.read(CHUNK_BYTES)):
                passed, goes_on = harm.pass_on(data, offset)
                offset += len(data)
                writer.write(passed)
                await writer.drain()
        writer.close()
        up_writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for task in tasks:
            task.cancel()


async def wrong_tokens(folder: Path, *, trials: int, seed: int) -> dict[str, Any]:
    """Try so many harmed transfers. Return how they ended, and how many answers had a wrong token."""
    chance = random.Random(seed)
    ends, kinds, wrong, blocks, too_many = Counter[str](), Counter[str](), 0, 0, 0
    options = options_of(
        DEMO, blocks=512, block_bytes=BLOCK_BYTES, host_blocks=512, max_model_len=1024, dtype="float32"
    )
    async with two_workers(folder, [*options, "--deterministic"]) as (source, destination):

        async def attempt(numbers: "asyncio.Queue[int]") -> None:
            nonlocal wrong, blocks, too_many
            while not numbers.empty():
                number = numbers.get_nowait()
                prompt = [chance.randrange(3, 4000) for _ in range(PROMPT_TOKENS)]
                expected = await source.ask(prompt, OUTPUT_TOKENS)
                harm = Harm(KINDS[number % len(KINDS)], _position(chance), chance.randrange(8))
                async with harmed(source, harm) as address:
                    order = source.order(BLOCKS, 1.0, address=address)
                    answer = await destination.ask(prompt, OUTPUT_TOKENS, pull=order)
                assert answer.report is not None
                if answer.report.end == PullEnd.PULL_END_AVOIDED:
                    numbers.put_nowait(number)  # the port was that of an earlier trial
                    continue
                ends[PullEnd.Name(answer.report.end).removeprefix("PULL_END_").lower()] += 1
                kinds[harm.kind] += 1
                wrong += answer.tokens != expected.tokens
                blocks += answer.report.num_blocks
                too_many += answer.report.num_blocks > harm.num_intact
                too_many += answer.cached_tokens != BLOCK_SIZE * answer.report.num_blocks

        numbers: asyncio.Queue[int] = asyncio.Queue()
        for number in range(trials):
            numbers.put_nowait(number)
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(attempt(numbers))
    return {
        "tried": sum(ends.values()),
        "kinds": dict(kinds),
        "ends": dict(ends),
        "wrong_tokens": wrong,
        "blocks_used": blocks,
        "harmed_blocks_used": too_many,
    }


def _first_difference(some: bytes, others: bytes) -> int:
    pairs = enumerate(zip(some, others, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(some), len(others)))


def _position(chance: random.Random) -> int:
    """Return a place in the source's answer: often at a boundary of its frames, otherwise anywhere."""
    if chance.random() < 0.3:
        boundary = REPLY_BYTES + FRAME_BYTES * chance.randrange(BLOCKS)
        return max(0, boundary + chance.choice((-1, 0, 1, 3, 4, 7, 8)))
    return chance.randrange(REPLY_BYTES + FRAME_BYTES * BLOCKS)
