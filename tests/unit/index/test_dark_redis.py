"""A Redis without memory, without a running lease, in Cluster mode or behind Sentinel: what the index makes of it."""

import logging

import pytest
from blockyard.deploy.settings.setting import masked
from blockyard.proto.index.contract import (
    ErrorKind,
    Incarnation,
    WorkerId,
)
from blockyard.proto.index.redis import check_url, error_kind
from blockyard.proto.index.redis_sentinel import parse_sentinel_url
from blockyard.proto.v1.cluster_pb2 import WorkerIndex
from blockyard.router.cluster.view import ClusterView
from blockyard.router.dispatch import index_report
from blockyard.router.dispatch.index_report import IndexWatch, Part, is_cut_off
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import ResponseError

PASSWORD = "hunter2"


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
