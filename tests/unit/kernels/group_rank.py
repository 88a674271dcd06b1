"""One rank of a group as a process: `python group_rank.py CASE SIZE RANK NAME`.

`sums` checks every collective against what all ranks can compute alone, and prints a digest of its results. `for-ever`
adds until that fails, and prints why.
"""

import hashlib
import sys
import time

import torch
from blockyard.kernels.cpu.extension import load_extension
from blockyard.kernels.cpu.group import MessageRing, RankGroup, RankLost

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


def check_sums(group: RankGroup) -> bytes:
    digest = hashlib.sha256()
    for case, count in enumerate(COUNTS):
        for dtype in DTYPES:
            x = contribution(group.rank, case, (count,), dtype)
            group.all_reduce(x)
            assert torch.equal(x, expected_sum(group.size, case, count, dtype)), (count, dtype)
            digest.update(x.view(torch.uint8).numpy().tobytes())
    return digest.digest()


def check_gathers(group: RankGroup) -> None:
    for case, shape in enumerate(SHAPES):
        for dtype in DTYPES:
            gathered = group.gather(contribution(group.rank, case, shape, dtype))
            if group.rank == 0:
                parts = [contribution(rank, case, shape, dtype) for rank in range(group.size)]
                assert gathered is not None
                assert torch.equal(gathered, torch.cat(parts, dim=1)), (shape, dtype)
            else:
                assert gathered is None


def check_broadcasts(group: RankGroup) -> None:
    for case, count in enumerate(COUNTS):
        for dtype in (*DTYPES, torch.int64):
            x = contribution(group.rank, case, (count,), torch.float32).mul(100).to(dtype)
            group.broadcast(x)
            assert torch.equal(x, contribution(0, case, (count,), torch.float32).mul(100).to(dtype))


def check_messages(ring: MessageRing) -> None:
    for count in (1, 1000, 65_536, 65_537, 1_000_000):
        sent = torch.arange(count, dtype=torch.int32).numpy()
        if ring.rank == 0:
            ring.send(memoryview(sent))
        else:
            assert ring.receive() == sent.tobytes(), count


def main(case: str, size: int, rank: int, name: str) -> None:
    library = load_extension()
    group_name, ring_name = name.split(",")
    group = RankGroup(lambda: library, rank=rank, size=size, name=group_name)
    ring = MessageRing(lambda: library, rank=rank, size=size, name=ring_name)
    print("ready", flush=True)
    if case == "sums":
        digest = check_sums(group)
        check_gathers(group)
        check_broadcasts(group)
        check_messages(ring)
        print(digest.hex() + check_sums(group).hex(), flush=True)
        return
    x = torch.ones(100)
    try:
        while True:
            group.all_reduce(x.fill_(1.0))
    except RankLost as error:
        print(f"{time.monotonic()} {error}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
