"""Long storms over the scheduler: all that may happen to it happens often."""

import pytest

from tests.unit.worker.weather import WEATHERS, weathered

ACTIONS = 12_000
"""In each of the weathers."""


@pytest.mark.fault(65)
@pytest.mark.parametrize("weather", WEATHERS)
def test_ten_thousand_actions_break_no_invariant_and_change_no_token(weather: str) -> None:
    storm, most_waiting = weathered(weather, ACTIONS)
    scheduler, moved = storm.scheduler, storm.moved
    # A storm in which nothing of it happened would prove nothing.
    assert most_waiting >= 5
    assert scheduler.num_preemptions > 10
    assert scheduler.pool.num_evictions > 100
    assert storm.device.moved["copies"] > 50
    assert (scheduler.num_swaps > 0) == (scheduler.config.swap_blocks > 0)
    assert scheduler.host_cache is None or scheduler.host_cache.num_evictions > 10
    assert len(storm.beams) > 5
    assert len(storm.embeddings) > 5
    assert moved["lent"] > 20
    has_host_cache = scheduler.host_cache is not None
    assert all((moved[kind] > 2) == has_host_cache for kind in ("pulled", "cut", "cancelled"))
    assert (moved["given back"] > 2) == (has_host_cache and scheduler.config.preemption == "auto")
    has_host_memory = scheduler.config.swap_blocks + scheduler.config.host_cache_blocks > 0
    assert (storm.device.num_broken > 2) == has_host_memory
    assert storm.device.num_found_corrupted > 0 or scheduler.config.host_cache_blocks < 60
    speculation = scheduler.speculation
    assert speculation is None or 300 < speculation.num_right < 0.95 * speculation.num_drafted
