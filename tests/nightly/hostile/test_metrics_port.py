"""The port that Prometheus scrapes: a silent client occupies a thread, so there are few, and for a short time."""

import socket
import urllib.request
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
from blockyard.proto.metrics import prometheus as prometheus_export
from blockyard.proto.metrics.prometheus import MAX_SCRAPES, metrics_endpoint
from blockyard.proto.metrics.readings import Source

from .rig import until


def test_silent_connections_are_few_and_end_and_then_it_is_scraped_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prometheus_export, "SCRAPE_SECONDS", 5.0)
    with (
        metrics_endpoint("127.0.0.1", 0, Source(table=(), labels={"worker": "a"}), dict) as url,
        ExitStack() as stack,
    ):
        place = (urlsplit(url).hostname, urlsplit(url).port)
        silent = [
            stack.enter_context(socket.create_connection(place, timeout=60)) for _ in range(MAX_SCRAPES)
        ]
        one_more = stack.enter_context(socket.create_connection(place, timeout=60))
        assert one_more.recv(1) == b""
        assert [connection.recv(1) for connection in silent] == [b""] * MAX_SCRAPES
        until(lambda: answers(url))


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return bool(response.status == 200)
    except OSError:
        return False
