"""The demo's own measurement: one request alone, with and without its prompt in the cache."""

from pathlib import Path

import pytest
from blockyard.deploy.demo.__main__ import alone_line
from blockyard.deploy.demo.prompts import DEMO_GROUPS
from blockyard.deploy.demo.traffic import LatencyAlone, chats_of, time_alone

from tests.system.processes import SIMULATED, processes


@pytest.mark.ci
@pytest.mark.cluster
async def test_a_request_alone_is_timed_with_and_without_its_prompt_in_the_cache(tmp_path: Path) -> None:
    with processes(tmp_path, with_redis=True) as cluster:
        workers = [cluster.add_worker(name, *SIMULATED) for name in ("worker-0", "worker-1")]
        router = cluster.add_router("router-0", workers=[worker.address for worker in workers])
        cluster.start(*workers, router)
        alone = await time_alone([router.address], chats_of(DEMO_GROUPS[0])[0])
    assert alone is not None
    assert 200 < alone.cached_tokens < alone.prompt_tokens
    assert min(alone.new_seconds, alone.cached_seconds) > 0


def test_both_times_are_told_with_what_was_cached() -> None:
    told = alone_line(
        LatencyAlone(new_seconds=0.064, cached_seconds=0.0144, prompt_tokens=283, cached_tokens=272)
    )
    assert "after 64 ms with nothing cached, after 14 ms with 272 of its 283 prompt tokens cached" in told
