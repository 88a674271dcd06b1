"""Look-ups on real Redis servers equal the caches of real engines under random traffic."""

import pytest

from tests.unit.index.harness import RedisHarness
from tests.unit.index.traffic import check_random_traffic


@pytest.mark.parametrize(("stride_blocks", "seed"), [(1, 1), (2, 2), (3, 3), (4, 4)])
async def test_redis_says_each_true_depth_rounded_down(
    redis_harness: RedisHarness, stride_blocks: int, seed: int
) -> None:
    await check_random_traffic(redis_harness.index, stride_blocks, seed)
