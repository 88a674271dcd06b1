"""Exchange between ranks of one machine: how long a step takes to reach another rank, and how long a sum takes.

    python -m bench.ranks [--ranks 2] [--rows 256] [--context 2048]

A step is packed, sent through shared memory, received and unpacked by every other rank. Its time is that from the
beginning of packing to the last rank's arrays, on one clock of the machine. Ranks wait for it as in a worker: the
pauses decide whether they spin or sleep. A sum is an all-reduce of [rows, hidden] in each data type. The table has
medians and CPU times.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from blockyard.kernels.cpu.extension import load_extension
from blockyard.kernels.cpu.group import MessageRing, RankGroup
from blockyard.worker.parallel.messages import pack, unpack
from blockyard.worker.parallel.step_arrays import StepArrays

BLOCK_SIZE = 16
NUM_STEPS, NUM_SUMS = 1000, 300
PAUSES_SECONDS = (0.0, 0.0001, 0.005)
SUM_ROWS, HIDDEN = (1, 16, 256, 2048), 4096
DTYPES = (torch.float32, torch.bfloat16)
START_SECONDS = 120.0


def decode_step(rows: int, context: int) -> StepArrays:
    """Return the arrays of a step of decodes, each with its own blocks."""
    blocks = -(-context // BLOCK_SIZE)
    return StepArrays(
        numbers=np.array([1, 1]),
        query_R=np.ones(rows, dtype=np.int64),
        context_R=np.full(rows, context),
        tables_RB=np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks),
        tokens_T=np.arange(rows),
        samples_R=np.ones(rows, dtype=np.int64),
    )


def follow(rank: int, size: int, names: tuple[str, str], arrived: Any, ready: Any) -> None:
    """Receive all steps and take part in all sums. Write the time of each step's arrival."""
    torch.set_num_threads(1)
    library = load_extension()
    ring = MessageRing(lambda: library, rank=rank, size=size, name=names[0])
    group = RankGroup(lambda: library, rank=rank, size=size, name=names[1])
    ready.wait(START_SECONDS)
    times = np.frombuffer(arrived, dtype=np.int64).reshape(size, -1)[rank]
    for number in range(len(times)):
        unpack(ring.receive())
        times[number] = time.monotonic_ns()
    for shape, dtype in sums():
        add_up(group, shape, dtype)
    ready.wait(START_SECONDS)


def sums() -> Iterator[tuple[tuple[int, int], torch.dtype]]:
    for rows in SUM_ROWS:
        for dtype in DTYPES:
            yield (rows, HIDDEN), dtype


def add_up(group: RankGroup, shape: tuple[int, int], dtype: torch.dtype) -> list[float]:
    """Return the seconds of each sum."""
    x, seconds = torch.zeros(shape, dtype=dtype), []
    for _ in range(NUM_SUMS):
        begin = time.perf_counter()
        group.all_reduce(x)
        seconds.append(time.perf_counter() - begin)
    return seconds


@contextmanager
def ranks(size: int, num_steps: int) -> Iterator[tuple[MessageRing, RankGroup, np.ndarray[Any, Any], Any]]:
    """Yield rank 0's ends, the times of arrival, and the barrier of all ranks, once all others have begun."""
    context = multiprocessing.get_context("spawn")
    library = load_extension()
    ring = MessageRing(lambda: library, rank=0, size=size)
    group = RankGroup(lambda: library, rank=0, size=size)
    names = (ring.memory.name, group.memory.name)
    arrived, ready = context.RawArray("q", size * num_steps), context.Barrier(size)
    others = [
        context.Process(target=follow, args=(rank, size, names, arrived, ready), daemon=True)
        for rank in range(1, size)
    ]
    try:
        for other in others:
            other.start()
        ready.wait(START_SECONDS)
    finally:
        ring.memory.unlink()
        group.memory.unlink()
    yield ring, group, np.frombuffer(arrived, dtype=np.int64).reshape(size, -1), ready
    for other in others:
        other.join(START_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ranks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=256, help="decodes of a step")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each decode")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    step = decode_step(arguments.rows, arguments.context)
    print(f"a step of {arguments.rows} rows: {4 * len(pack(step)):,} bytes, to {arguments.ranks - 1} ranks\n")
    print("| pause before | to the last rank, median | p90 | least | CPU time of rank 0 |")
    print("|---|---|---|---|---|")
    with ranks(arguments.ranks, NUM_STEPS * len(PAUSES_SECONDS)) as (ring, group, arrived, ready):
        for course, pause_seconds in enumerate(PAUSES_SECONDS):
            begun, cpu_seconds = np.zeros(NUM_STEPS, dtype=np.int64), 0.0
            for number in range(NUM_STEPS):
                time.sleep(pause_seconds)
                begun[number], cpu = time.monotonic_ns(), time.thread_time()
                ring.send(pack(step).data)
                cpu_seconds += time.thread_time() - cpu
            # The sums begin once every rank has received all steps of the last course.
            while not arrived[1:, (course + 1) * NUM_STEPS - 1].all():
                time.sleep(0.001)
            ended = arrived[1:, course * NUM_STEPS : (course + 1) * NUM_STEPS].max(axis=0)
            took = sorted(((ended - begun) / 1e3).tolist())
            figures = (
                statistics.median(took),
                took[int(0.9 * NUM_STEPS)],
                took[0],
                1e6 * cpu_seconds / NUM_STEPS,
            )
            print(
                f"| {1e3 * pause_seconds:g} ms |", " | ".join(f"{figure:.0f} us" for figure in figures), "|"
            )
        print("\n| sum of | bytes | median | least |\n|---|---|---|---|")
        for shape, dtype in sums():
            seconds = add_up(group, shape, dtype)
            print(
                f"| {shape[0]} x {shape[1]} {str(dtype).removeprefix('torch.')} "
                f"| {shape[0] * shape[1] * dtype.itemsize:,} | {1e6 * statistics.median(seconds):.0f} us "
                f"| {1e6 * min(seconds):.0f} us |"
            )
        ready.wait(START_SECONDS)


if __name__ == "__main__":
    main()
