"""A Redis without memory, without a running lease, in Cluster mode or behind Sentinel: what the index makes of it."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from blockyard.deploy.machine.redis_server import start_private_redis
from blockyard.deploy.settings.setting import masked
from blockyard.proto.index.contract import (
    Batch,
    ErrorKind,
    Incarnation,
    PrefixIndexError,
    RenewResult,
    WorkerId,
)
from blockyard.proto.index.redis import check_url, connect, error_kind
from blockyard.proto.index.redis_sentinel import parse_sentinel_url
from blockyard.proto.v1.cluster_pb2 import IndexState, WorkerIndex
from blockyard.router.cluster.view import ClusterView
from blockyard.router.dispatch import index_report
from blockyard.router.dispatch.index_report import IndexWatch, Part, is_cut_off
from blockyard.router.dispatch.prefix_lookup import (
    BreakerState,
    LookupResult,
    PrefixLookup,
    PrefixLookupConfig,
)
from blockyard.worker.indexing.publisher import IndexPublisher
from blockyard.worker.indexing.report import index_message
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import ResponseError

from tests.redis_servers import each_server

from .harness import IndexHarness, RedisHarness, chain, record

PASSWORD = "hunter2"


@pytest.fixture(params=each_server())
async def full(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RedisHarness]:
    process = start_private_redis(tmp_path, executable=request.param)
    try:
        async with connect(process.url, timeout_seconds=5.0) as client:
            yield RedisHarness(client, cluster="full")
    finally:
        process.stop()


async def fill_memory(harness: RedisHarness) -> None:
    await harness.client.config_set("maxmemory", 1)


async def free_memory(harness: RedisHarness) -> None:
    await harness.client.config_set("maxmemory", 0)


async def test_where_memory_is_full_leases_go_on_and_blocks_leave(full: RedisHarness) -> None:
    index = full.index
    berth = await index.register(record("a"), lease_seconds=60)
    await index.apply(berth, Batch(sequence=1, added=chain(8)))
    await fill_memory(full)
    assert await index.renew(berth, lease_seconds=60) is RenewResult.FULL
    grows = Batch(sequence=2, removed=chain(8)[:3:-1], added=chain(9, "other"))
    for _ in range(2):
        with pytest.raises(PrefixIndexError) as caught:
            await index.apply(berth, grows)
        assert caught.value.kind is ErrorKind.FULL
    assert [holder.depth for holder in await index.lookup(chain(8))] == [4], "what was removed is removed"
    assert not await index.lookup(chain(9, "other"))
    await free_memory(full)
    await index.apply(berth, grows)
    assert [holder.depth for holder in await index.lookup(chain(9, "other"))] == [9]
    assert await index.renew(berth, lease_seconds=60, applied_sequence=2) is RenewResult.OK


async def test_a_batch_that_takes_no_more_than_it_gives_back_passes_a_full_redis(full: RedisHarness) -> None:
    index = full.index
    berth = await index.register(record("a"), lease_seconds=60)
    await index.apply(berth, Batch(sequence=1, added=chain(8)))
    await fill_memory(full)
    await index.apply(berth, Batch(sequence=2, removed=chain(8)[::-1], added=chain(8, "other")))
    assert [holder.depth for holder in await index.lookup(chain(8, "other"))] == [8]


async def test_a_full_redis_takes_registrations_and_is_purged(full: RedisHarness) -> None:
    index = full.index
    gone = await index.register(record("gone"), lease_seconds=60)
    await index.apply(gone, Batch(sequence=1, added=chain(8)))
    await fill_memory(full)
    await index.retire(gone)
    assert await index.register(record("new"), lease_seconds=60)
    while (await index.purge(slice_buckets=4096)).active:
        pass
    assert await full.num_entries() == 0


async def test_a_publisher_says_full_until_a_renewal_finds_memory(full: RedisHarness) -> None:
    now = 0.0
    publisher = IndexPublisher(full.index, record("a"), clock=lambda: now)
    for _ in range(2):  # register, purge
        await publisher._do_what_is_most_urgent()
    assert not index_message(publisher.state()).cut_off
    await fill_memory(full)
    now = 2.0
    await publisher._do_what_is_most_urgent()
    message = index_message(publisher.state())
    assert (message.cut_off, message.state) == (True, IndexState.INDEX_STATE_DEGRADED)
    assert message.state_reason == "is refused by Redis, which is out of memory (maxmemory)"
    await publisher._purge()
    assert index_message(publisher.state()).cut_off, "a purge takes no memory, so its success tells nothing"
    await free_memory(full)
    now = 4.0
    await publisher._do_what_is_most_urgent()
    assert not index_message(publisher.state()).cut_off
    await publisher.close()


async def test_a_lookup_that_expects_workers_wants_a_running_lease(harness: IndexHarness) -> None:
    async def kind() -> ErrorKind | None:
        try:
            assert not await harness.index.lookup(chain(3), expects_workers=True)
        except PrefixIndexError as error:
            return error.kind
        return None

    assert await kind() is ErrorKind.NO_LEASE, "nobody has registered"
    berth = await harness.index.register(record("a"), lease_seconds=0.2)
    assert await kind() is None, "the worker has published nothing"
    await harness.advance(0.3)
    assert await kind() is ErrorKind.NO_LEASE
    assert not await harness.index.lookup(chain(3))
    await harness.index.renew(berth, lease_seconds=60)
    assert await kind() is None


async def test_an_index_without_a_lease_is_unavailable_at_once_and_available_at_once(
    redis_harness: RedisHarness,
) -> None:
    lookup = PrefixLookup(redis_harness.index, config=PrefixLookupConfig(timeout_seconds=5.0))
    known = {WorkerId("a"): Incarnation("1")}
    for _ in range(5):
        assert await lookup.lookup(chain(3), known) == LookupResult(available=False)
    assert (lookup.breaker_state(), lookup.errors) == (BreakerState.CLOSED, {ErrorKind.NO_LEASE: 5})
    await redis_harness.index.register(record("a"), lease_seconds=60)
    assert await lookup.lookup(chain(3), known) == LookupResult(available=True)
    assert await lookup.lookup(chain(3), known, is_cut_off=True) == LookupResult(available=False)
    assert (lookup.num_lookups, lookup.num_skipped) == (6, 1)


def part(cut_off: bool | None) -> Part:
    index = None if cut_off is None else WorkerIndex(cut_off=cut_off, state_reason="is refused")
    return Part(worker_id=WorkerId("w"), incarnation=Incarnation("1"), index=index)


@given(st.lists(st.sampled_from((True, False, None))))
def test_half_of_the_reporting_workers_decide(reports: list[bool | None]) -> None:
    expected = reports.count(True) >= reports.count(False) and True in reports
    assert is_cut_off([part(report) for report in reports]) is expected


def test_a_change_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now, parts = 0.0, [part(True)]
    monkeypatch.setattr(index_report, "_parts", lambda view: parts)
    view = ClusterView(suspect_seconds=1, lost_seconds=2, clock=lambda: now)
    watch = IndexWatch(view, lambda: now)
    with caplog.at_level(logging.WARNING):
        assert watch.is_cut_off()
        parts = [part(False)]
        assert watch.is_cut_off(), "it looks every tenth of a second"
        now = 0.2
        assert not watch.is_cut_off()
        now = 0.4
        assert not watch.is_cut_off()
    assert [entry.getMessage() for entry in caplog.records] == [
        "the prefix index is cut off: worker w is refused; requests are placed without it",
        "the workers reach the prefix index again; placement uses it",
    ]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("ERR Error running script: @user_script: 100: -OOM command not allowed", ErrorKind.FULL),
        ("command not allowed when used memory > 'maxmemory'. script: on @user_script:100.", ErrorKind.FULL),
        ("ERR Script attempted to access keys that do not hash to the same slot", ErrorKind.CLUSTER_MODE),
        ("ERR Script attempted to access a non local key in a cluster node", ErrorKind.CLUSTER_MODE),
        ("CLUSTERDOWN Hash slot not served", ErrorKind.CLUSTER_MODE),
        ("NOLEASE no worker has a running lease", ErrorKind.NO_LEASE),
    ],
)
def test_the_words_of_each_version_are_known(text: str, kind: ErrorKind) -> None:
    assert error_kind(ResponseError(text)) is kind


URL = f"redis+sentinel://user:{PASSWORD}@one,[::1]:26380,three.example:1/main/2"


def test_a_url_of_sentinel_names_hosts_service_database_and_both_logins() -> None:
    parsed = parse_sentinel_url(f"{URL}?sentinel_username=watch&sentinel_password=p%40ss")
    assert parsed.sentinels == (("one", 26379), ("::1", 26380), ("three.example", 1))
    assert (parsed.service, parsed.is_tls) == ("main", False)
    assert parsed.of_redis == {"username": "user", "password": PASSWORD, "db": 2}
    assert parsed.of_sentinel == {"username": "watch", "password": "p@ss"}


def test_over_tls_both_servers_get_the_certificates() -> None:
    parsed = parse_sentinel_url("rediss+sentinel://one/main?ssl_ca_certs=ca.pem")
    assert parsed.is_tls
    assert parsed.of_redis == {"db": 0, "ssl_ca_certs": "ca.pem"}
    assert parsed.of_sentinel == {"ssl_ca_certs": "ca.pem"}
    check_url("rediss+sentinel://one/main?ssl_ca_certs=ca.pem")


@pytest.mark.parametrize(
    "url",
    [
        f"redis+sentinel://u:{PASSWORD}@/main",
        f"redis+sentinel://u:{PASSWORD}@one",
        f"redis+sentinel://u:{PASSWORD}@one/",
        f"redis+sentinel://u:{PASSWORD}@one,/main",
        f"redis+sentinel://u:{PASSWORD}@one:port/main",
        f"redis+sentinel://u:{PASSWORD}@one/main/database",
        f"redis+sentinel://u:{PASSWORD}@one/main/0/more",
        f"redis+sentinel://u:{PASSWORD}@one/main?nothing_of_this_name=1",
        f"unix+sentinel://u:{PASSWORD}@one/main",
    ],
)
def test_a_malformed_url_of_sentinel_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match="this is no") as caught:
        check_url(url)
    assert PASSWORD not in str(caught.value)


def test_the_passwords_of_a_url_of_sentinel_are_masked() -> None:
    shown = masked(f"{URL}?sentinel_password={PASSWORD}&ssl_ca_certs=ca.pem")
    assert shown == "redis+sentinel://user:***@one,[::1]:26380,three.example:1/main/2?***&ssl_ca_certs=ca.pem"
