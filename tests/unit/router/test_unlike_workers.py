"""Workers with unlike blocks in one cluster: they serve together, share names, and exchange no blocks."""

import logging
from typing import Any

import pytest
from blockyard.proto.index.contract import Incarnation, WorkerId
from blockyard.proto.v1 import cluster_pb2, session_pb2
from blockyard.router.cluster.depths import CachedDepth
from blockyard.router.cluster.fleet import Fleet
from blockyard.router.cluster.link import EngineLink
from blockyard.router.cluster.view import ClusterView
from blockyard.router.placement.config import PlacementConfig
from blockyard.router.placement.pulls import Holder
from blockyard.router.placement.scoring import best_score

from .prompt import NAMES, PROMPT_TOKENS, Clock

CPU = {"kv_layout": "layers=2xcpu-16/1", "kv_arithmetic": "kernels=cpu"}
TORCH = {"kv_layout": "layers=2xplain/1", "kv_arithmetic": "kernels=torch"}
DETERMINISTIC = {"kv_layout": "layers=2xplain/1", "kv_arithmetic": "kernels=torch-deterministic"}
OLDER: dict[str, Any] = {}
ABLE = cluster_pb2.WorkerLoad(
    pull_bytes_per_second=1e9,
    pull_setup_seconds=0.001,
    host_tokens_per_second=1e6,
    prefill_tokens_per_second=1e3,
)


def hello(name: str, kind: dict[str, Any]) -> session_pb2.Hello:
    known = {"worker_id": name, "incarnation": f"{name}-life", "tokenizer_fingerprint": "t", "block_size": 16}
    known |= {"total_blocks": 1000, "max_model_len": 512, "vocab_size": 100}
    return session_pb2.Hello(**known, transfer_port=7, block_bytes=1000, **kind)


def fleet_of(code: str = "", **kinds: dict[str, Any]) -> Fleet:
    clock = Clock()
    fleet = Fleet(tokenizer_fingerprint="t", suspect_seconds=2.0, lost_seconds=6.0, clock=clock, code=code)
    for name, kind in kinds.items():
        fleet.links[name] = EngineLink(name, fleet, lost_seconds=2.0, clock=clock)
        assert fleet.accept(name, hello(name, kind)) is None, "unlike workers serve together"
        fleet.view.heard(name, ABLE)
    return fleet


def pulled_from(view: ClusterView, depths: dict[str, int]) -> dict[str, str | None]:
    """Return from which worker each one would fetch a prompt of which these workers have so many blocks."""
    cached = {WorkerId(name): CachedDepth(blocks=blocks) for name, blocks in depths.items()}
    sources = view.pull_sources(cached, PROMPT_TOKENS, salt=1)
    found = {}
    for candidate in view.candidates(NAMES, PROMPT_TOKENS, cached):
        pull = best_score(PROMPT_TOKENS, candidate, PlacementConfig(), sources).pull
        found[candidate.worker_id] = None if pull is None else pull.source.worker_id
    return {str(name): source for name, source in found.items()}


def test_a_worker_fetches_from_like_workers_alone_whatever_unlike_ones_have() -> None:
    view = fleet_of(a=CPU, b=CPU, c=TORCH, d=TORCH, e=TORCH, f=DETERMINISTIC, g=OLDER, h=OLDER).view
    full = len(NAMES)
    # The three that have most are of another kind than a and b.
    everywhere = {"b": full - 1, "c": full, "d": full, "e": full, "f": full, "g": full}
    assert pulled_from(view, everywhere) == {**dict.fromkeys("abcdefgh"), "a": "b"}
    assert pulled_from(view, {"g": full, "f": full}) == dict.fromkeys("abcdefgh")


def test_what_is_handed_over_is_fetched_by_like_workers_and_computed_by_others() -> None:
    view = fleet_of(a=CPU, b=CPU, c=TORCH).view
    holder = view.holding_source(Holder("a", Incarnation("a-life"), PROMPT_TOKENS), PROMPT_TOKENS)
    assert holder is not None
    fetching = {
        str(candidate.worker_id)
        for candidate in view.candidates(NAMES, PROMPT_TOKENS, {})
        if best_score(PROMPT_TOKENS, candidate, PlacementConfig(), [holder]).pull is not None
    }
    assert fetching == {"b"}


def test_a_short_worker_hears_of_room_on_like_workers_alone() -> None:
    fleet = fleet_of(a=CPU, b=TORCH, c=OLDER)
    fleet.view.heard("a", cluster_pb2.WorkerLoad(used_blocks=990))
    assert fleet.room_elsewhere("a") is None
    fleet = fleet_of(a=CPU, b=TORCH, c=CPU)
    fleet.view.heard("a", cluster_pb2.WorkerLoad(used_blocks=990))
    room = fleet.room_elsewhere("a")
    assert room is not None
    assert room.blocks > 0


def test_a_worker_measures_its_link_from_like_workers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_of(a=CPU, b=TORCH, c=OLDER, d=CPU)
    asked: list[str] = []
    monkeypatch.setattr(EngineLink, "measure_link", lambda _, address, incarnation: asked.append(incarnation))
    for name in "abc":
        fleet.heard(name, cluster_pb2.WorkerLoad(host_tokens_per_second=1e6))
    assert asked == ["d-life"]


def test_the_log_says_once_for_each_pair_why_it_exchanges_no_blocks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fleet = fleet_of(a=TORCH, b=CPU, c=CPU, d=DETERMINISTIC, e=OLDER)
        for _ in range(3):  # they come back
            for name, kind in {"a": TORCH, "b": CPU, "c": CPU, "d": DETERMINISTIC}.items():
                fleet.disconnected(name, "the stream ended")
                fleet.accept(name, hello(name, kind))
    lines = [record.message for record in caplog.records if "exchange no blocks" in record.message]
    assert len(lines) == len(set(lines))
    assert lines[0] == (
        "workers b and a exchange no blocks, and compute what they lack: layers is 2xcpu-16/1, not 2xplain/1, "
        "kernels is cpu, not torch"
    )
    assert "kernels is torch-deterministic, not torch" in caplog.text
    assert "older version" in caplog.text
    assert not any("workers c and b" in line or "workers b and c" in line for line in lines)


@pytest.mark.parametrize(("code", "is_told"), [("0.1.0+aaaa", False), ("0.1.0+bbbb", True)])
def test_other_code_is_accepted_and_told(code: str, is_told: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fleet_of(code="0.1.0+aaaa", a={"version": code})
    assert ("runs blockyard 0.1.0+bbbb, this router 0.1.0+aaaa" in caplog.text) is is_told
