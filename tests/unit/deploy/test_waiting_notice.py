"""Messages of a waiting command, where the command ends before an answer comes."""

import threading
from collections.abc import Generator

import pytest
from blockyard.deploy.requests.waiting_messages import with_waiting_notice
from blockyard.proto.v1.cluster_pb2 import Worker
from blockyard.router.client import Client, Delta

SECONDS = 60.0
NOBODYS = "127.0.0.1:1"


def test_a_look_at_the_workers_that_outlasts_the_command_ends_without_a_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, closed, raised = threading.Event(), threading.Event(), list[str]()
    lookers = list[threading.Thread]()
    onlooker = Client(NOBODYS, timeout_seconds=SECONDS)

    def workers() -> list[Worker]:
        lookers.append(threading.current_thread())
        looking.set()
        assert closed.wait(SECONDS)
        return onlooker.list_workers()

    def deltas() -> Generator[Delta, None, None]:
        assert looking.wait(SECONDS)
        yield Delta(request_id="r", text="", token_ids=(), token_offset=0, finish=None)

    monkeypatch.setattr(threading, "excepthook", lambda hooked: raised.append(repr(hooked.exc_value)))
    assert len(list(with_waiting_notice(deltas(), workers, "", silence_seconds=0.0))) == 1
    onlooker.close()
    closed.set()
    lookers[0].join(SECONDS)
    assert raised == []
    assert capsys.readouterr().err == ""
