"""A worker with other code than the router's still serves, because messages are compatible, and the log says so."""

import logging

import pytest
from blockyard.proto.v1 import session_pb2
from blockyard.router.cluster.fleet import Fleet
from blockyard.router.cluster.link import EngineLink

from .prompt import Clock


@pytest.mark.parametrize(("code", "is_told"), [("0.1.0+aaaa", False), ("0.1.0+bbbb", True)])
def test_other_code_is_accepted_and_told(code: str, is_told: bool, caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(tokenizer_fingerprint="t", suspect_seconds=1.0, lost_seconds=2.0, code="0.1.0+aaaa")
    fleet.links["a:1"] = EngineLink("a:1", fleet, lost_seconds=2.0, clock=Clock())
    hello = session_pb2.Hello(
        worker_id="worker-0",
        incarnation="life-0",
        tokenizer_fingerprint="t",
        block_size=16,
        total_blocks=10,
        max_model_len=100,
        vocab_size=100,
        version=code,
    )
    with caplog.at_level(logging.WARNING):
        assert fleet.accept("a:1", hello) is None
    assert ("runs blockyard 0.1.0+bbbb, this router 0.1.0+aaaa" in caplog.text) is is_told
