"""transformers as a peer: its configuration in either shape, and a failed thread, which is reported at once."""

import sys
from collections import deque
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from bench.engine.systems import PEERS


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as its own process imports it."""
    monkeypatch.syspath_prepend(str(PEERS))
    yield import_module("transformers_run")
    for name in ("transformers_run", "protocol"):
        sys.modules.pop(name)


@dataclass
class Of517:
    block_size: int = 256
    num_blocks: int | None = None
    max_batch_tokens: int | None = None


@dataclass
class Of523:
    page_size: int = 256
    num_blocks: int | None = None
    max_batch_tokens: int | None = None
    block_size: int | None = None
    """Deprecated: it must not be given."""


def test_a_page_is_asked_for_under_the_name_that_this_transformers_has_for_it(peer: Any) -> None:
    pages = peer.PAGE_TOKENS
    assert peer.batching_config(Of517, 7) == Of517(pages, 7, peer.MAX_BATCH_TOKENS)
    assert peer.batching_config(Of523, 7) == Of523(pages, 7, peer.MAX_BATCH_TOKENS, None)


@dataclass
class Manager:
    """Stand-in for transformers' own manager, with the parts that the bench uses."""

    results: deque[Any] = field(default_factory=deque)
    runs: bool = True
    takes: bool = True
    is_stopped: bool = False
    background_thread_status: Any = field(default_factory=lambda: SimpleNamespace(fatal_error=None))

    def add_request(self, token_ids: list[int], *, request_id: str, **_: Any) -> str | None:
        return request_id if self.takes else None

    def get_result(self, timeout: float) -> Any:
        return self.results.popleft() if self.results else None

    def is_running(self) -> bool:
        return self.runs

    def stop(self, *, block: bool, hard_stop: bool) -> None:
        assert hard_stop
        assert not block
        self.is_stopped = True


def result(number: int, *tokens: int, error: str | None = None) -> Any:
    return SimpleNamespace(request_id=str(number), generated_tokens=list(tokens), error=error)


def test_a_step_brings_what_is_new_of_each_request_and_nothing_while_there_is_nothing(peer: Any) -> None:
    manager = Manager()
    batches = peer.ContinuousBatches(manager)
    batches.add(0, [1], 2)
    batches.add(1, [2], 2)
    assert not list(batches.step())
    manager.results.extend([result(0, 5), result(1, 8), result(0, 5, 6)])
    assert list(batches.step()) == [(0, [5]), (1, [8]), (0, [6])]
    assert not manager.is_stopped


def test_a_thread_that_has_ended_is_told_once_all_that_it_brought_is_taken(peer: Any) -> None:
    manager = Manager(deque([result(0, 5)]), runs=False)
    manager.background_thread_status.fatal_error = MemoryError("out of memory")
    batches = peer.ContinuousBatches(manager)
    batches.add(0, [1], 2)
    assert list(batches.step()) == [(0, [5])]
    with pytest.raises(RuntimeError, match="its thread has ended: out of memory"):
        list(batches.step())


def test_a_failed_request_ends_the_thread_too(peer: Any) -> None:
    manager = Manager(deque([result(0, error="too long")]))
    batches = peer.ContinuousBatches(manager)
    batches.add(0, [1], 2)
    with pytest.raises(RuntimeError, match="too long"):
        list(batches.step())
    assert manager.is_stopped


def test_a_request_that_is_not_taken_is_told(peer: Any) -> None:
    with pytest.raises(RuntimeError, match="takes no requests"):
        peer.ContinuousBatches(Manager(takes=False)).add(0, [1], 2)
