"""One rank of a group as a process: `python group_rank.py CASE SIZE RANK NAME`.

`sums` checks every collective against what all ranks can compute alone, and prints a digest of its results. `for-ever`
adds until that fails, and prints why.
"""

import hashlib
import sys
import time
from collections.abc import Sequence
from itertools import product

import torch
from blockyard.kernels.cpu.extension import load_extension
from blockyard.kernels.cpu.group import MessageRing, RankGroup, RankLost
from blockyard.kernels.cpu.library import CpuLibrary

COUNTS = (1, 15, 16, 17, 1000, 4096, 65_536, 65_537, 200_003)
SHAPES = ((1, 1), (3, 7), (5, 1000), (17, 33_333), (256, 4096))
DTYPES = (torch.float32, torch.bfloat16)


def contribution(rank: int, case: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * case + rank)
    return torch.randn(*shape, generator=generator).to(dtype)


def expected_sum(size: int, case: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum in fp32 in the order of ranks, rounded once."""
    total = contribution(0, case, (count,), dtype).float()
    for rank in range(1, size):
        total = total + contribution(rank, case, (count,), dtype).float()
    return total.to(dtype)


def check_rank(
    library: CpuLibrary, rank: int, size: int, names: tuple[str, str], counts: Sequence[int] = COUNTS
) -> str:
    """Check every collective against what all ranks can compute alone. Return a digest of all sums.

    The same sums again give the same bits.
    """
    group = RankGroup(lambda: library, rank=rank, size=size, name=names[0])
    ring, digests = MessageRing(lambda: library, rank=rank, size=size, name=names[1]), set[str]()
    for _ in range(2):
        digest = hashlib.sha256()
        for (case, count), dtype in product(enumerate(counts), DTYPES):
            x = contribution(rank, case, (count,), dtype)
            group.all_reduce(x)
            assert torch.equal(x, expected_sum(size, case, count, dtype)), (count, dtype)
            digest.update(x.view(torch.uint8).numpy().tobytes())
        digests.add(digest.hexdigest())
    for (case, shape), dtype in product(enumerate(SHAPES), DTYPES):
        gathered = group.gather(contribution(rank, case, shape, dtype))
        assert (gathered is None) == (rank > 0)
        if gathered is not None:
            parts = [contribution(other, case, shape, dtype) for other in range(size)]
            assert torch.equal(gathered, torch.cat(parts, dim=1)), (shape, dtype)
    for (case, count), dtype in product(enumerate(counts), (*DTYPES, torch.int64)):
        x = contribution(rank, case, (count,), torch.float32).mul(100).to(dtype)
        group.broadcast(x)
        assert torch.equal(x, contribution(0, case, (count,), torch.float32).mul(100).to(dtype))
    for count in (1, 1000, 65_536, 65_537, 1_000_000):
        sent = torch.arange(count, dtype=torch.int32).numpy()
        if rank == 0:
            ring.send(memoryview(sent))
        else:
            assert ring.receive() == sent.tobytes(), count
    (result,) = digests
    return result


def main(case: str, size: int, rank: int, name: str) -> None:
    library, names = load_extension(), name.partition(",")[::2]
    if case == "sums":
        print("ready", flush=True)
        print(check_rank(library, rank, size, names), flush=True)
        return
    group = RankGroup(lambda: library, rank=rank, size=size, name=names[0])
    print("ready", flush=True)
    x = torch.ones(100)
    try:
        while True:
            group.all_reduce(x.fill_(1.0))
    except RankLost as error:
        print(f"{time.monotonic()} {error}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
