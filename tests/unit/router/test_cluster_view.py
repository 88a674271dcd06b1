"""The cluster view follows from events and time alone."""

from random import Random
from typing import Any

import pytest
from blockyard.proto.index.contract import Incarnation, WorkerId
from blockyard.proto.v1 import cluster_pb2, session_pb2
from blockyard.router.cluster.bookings import Placed
from blockyard.router.cluster.depths import CachedDepth, usable_cached_tokens
from blockyard.router.cluster.view import ClusterView
from blockyard.router.cluster.worker_view import WorkerState
from blockyard.router.placement.config import PlacementConfig
from blockyard.router.placement.policies import PlacementRequest, place
from blockyard.router.placement.pulls import Holder
from hypothesis import given
from hypothesis import strategies as st

from .candidates import hello_of, view_of
from .fake_worker import KIND
from .prompt import NAMES, PROMPT_TOKENS

STORED_GRACE_SECONDS = PlacementConfig().stored_grace_seconds


def placed(
    view: ClusterView, address: str = "a", *, blocks: int = 1, tokens: int = 1, **given: Any
) -> Placed:
    fields = {"names": [], "prompt_tokens": PROMPT_TOKENS} | given
    return view.placed(address, uncached_tokens=tokens, blocks=blocks, **fields)


def sent(view: ClusterView, **given: Any) -> Placed:
    """Placed, and on its way."""
    made = placed(view, **given)
    view.sent(made)
    return made


def cached_tokens(view: ClusterView, names: list[bytes] = NAMES) -> dict[str, int]:
    return {c.worker_id: c.cached_tokens for c in view.candidates(names, PROMPT_TOKENS, {})}


def load(view: ClusterView) -> tuple[int, int, int]:
    """Sequences, queued tokens and blocks of the first worker."""
    worker = view.candidates([], 100, {})[0]
    return worker.sequences, worker.queued_prefill_tokens, worker.used_blocks


def test_silence_makes_a_worker_suspect_and_then_lost_and_any_word_brings_it_back() -> None:
    view, clock = view_of("a")
    seen = []
    for _ in range(8):
        seen.append(view.state(view.workers()[0]))
        clock.now += 1.0
    ready, suspect, lost = WorkerState.READY, WorkerState.SUSPECT, WorkerState.LOST
    assert seen == [ready, ready, suspect, suspect, suspect, suspect, lost, lost]
    assert view.candidates([], 10, {}) == []
    view.heard("a")
    assert view.state(view.workers()[0]) is ready


def test_a_placed_prefix_counts_at_once_until_the_index_has_it_and_not_once_it_was_rejected() -> None:
    view, clock = view_of("a", "b")
    first = placed(view, names=NAMES[:10])
    assert cached_tokens(view) == {"a": 160, "b": 0}
    view.started(first)
    clock.now += STORED_GRACE_SECONDS * 0.9
    assert cached_tokens(view)["a"] == 160
    clock.now += STORED_GRACE_SECONDS * 0.2
    assert cached_tokens(view)["a"] == 0
    view.ended(first)
    rejected, _ = placed(view, names=NAMES[:10]), placed(view, names=NAMES[:6])
    view.ended(rejected, busy=False)
    assert cached_tokens(view)["a"] == 96, "its neighbour's"
    view.check_invariants()


def test_what_was_placed_counts_beside_a_report_exactly_where_the_report_lacks_it() -> None:
    view, _ = view_of("a")
    sent(view, tokens=160, blocks=10)
    assert load(view) == (1, 160, 10)
    view.heard("a", cluster_pb2.WorkerLoad(waiting=1, queued_prefill_tokens=160, used_blocks=10))
    assert load(view) == (1, 160, 10), "not counted twice"
    view.heard("a", cluster_pb2.WorkerLoad(running=9, queued_prefill_tokens=700, used_blocks=50))
    assert load(view) == (9, 700, 50), "another router's load"
    after = sent(view, tokens=30, blocks=2)
    assert load(view) == (10, 730, 52)
    view.started(after)
    assert load(view) == (10, 700, 52)
    view.heard("a", cluster_pb2.WorkerLoad(running=10, queued_prefill_tokens=700, used_blocks=52))
    view.ended(after)
    assert load(view) == (10, 700, 52)
    view.check_invariants()


def test_a_request_that_had_not_reached_the_worker_counts_beside_its_report() -> None:
    """With several routers, a worker reports often, and the report may cross our request on the way."""
    view, _ = view_of("a")
    for handle in (1, 2):
        sent(view, tokens=100, blocks=7).handle = handle
    for last_handle, tokens in ((0, 900), (1, 800), (2, 700), (None, 700)):
        view.heard("a", cluster_pb2.WorkerLoad(queued_prefill_tokens=700), last_handle)
        assert load(view)[1] == tokens
        view.check_invariants()


def test_context_counts_as_often_as_it_is_read() -> None:
    view, _ = view_of("a")
    for _ in range(3):
        sent(view, names=NAMES, tokens=0, blocks=0)
    assert view.candidates([], 100, {})[0].context_tokens == 3 * PROMPT_TOKENS
    view.heard("a", cluster_pb2.WorkerLoad(running=9, context_tokens=9_000))
    sent(view, names=NAMES, tokens=0, blocks=0)
    placed(view, names=NAMES, tokens=0, blocks=0)
    assert view.candidates([], 100, {})[0].context_tokens == 9_000 + 2 * PROMPT_TOKENS


def test_who_waits_for_a_worker_counts_beside_all_that_it_reports_and_takes_no_place_there() -> None:
    view, _ = view_of("a", max_waiting=1)
    waiting = [placed(view, names=NAMES[:5], tokens=50, blocks=3) for _ in range(4)]
    view.heard("a", cluster_pb2.WorkerLoad(running=9, queued_prefill_tokens=700, used_blocks=50))
    assert load(view) == (13, 900, 62)
    assert cached_tokens(view) == {"a": 80}
    assert view.has_room("a")
    view.sent(waiting[0])
    assert not view.has_room("a")
    with view.without(waiting[1]):
        assert load(view)[0] == 12
    for each in waiting:
        view.ended(each)
    view.check_invariants()


def test_a_worker_that_drains_is_no_candidate_until_it_says_otherwise() -> None:
    view, _ = view_of("a", "b")
    view.draining("a")
    view.heard("a", cluster_pb2.WorkerLoad())
    assert [worker.worker_id for worker in view.candidates([], 10, {})] == ["b"]
    assert view.state(view.workers()[0]) is WorkerState.DRAINING
    view.draining("a", False)
    assert len(view.candidates([], 10, {})) == 2


def test_a_burst_sends_a_worker_no_more_than_its_queue_takes() -> None:
    view, clock = view_of("a", max_waiting=3)

    def sent_until_full() -> list[Placed]:
        made = []
        while view.has_room("a"):
            made.append(sent(view))
        return made

    first = sent_until_full()
    assert len(first) == 3
    view.started(first[0])
    assert len(sent_until_full()) == 1, "first tokens make room even where no report comes"
    clock.now += 1.0
    assert not sent_until_full(), "nothing was heard: they may all wait there yet"
    view.heard("a", cluster_pb2.WorkerLoad(running=2, waiting=1))
    assert len(sent_until_full()) == 2
    view.heard("a", cluster_pb2.WorkerLoad(running=5))
    assert len(sent_until_full()) == 3
    assert len(view.candidates([], 10, {})) == 1, "it may be waited for"


@pytest.mark.parametrize("max_waiting", [0, 64])
def test_unstarted_requests_of_one_router_are_bounded_whatever_a_worker_would_queue(max_waiting: int) -> None:
    view, _ = view_of("a", max_waiting=max_waiting, config=PlacementConfig(max_unstarted=5))
    first, *_ = [sent(view) for _ in range(5)]
    view.heard("a", cluster_pb2.WorkerLoad())
    assert not view.has_room("a")
    view.started(first)
    assert view.has_room("a")


def test_what_the_index_promised_and_was_not_reused_is_stale() -> None:
    view, _ = view_of("a")
    for promised, reused in ((10, 10), (10, 4), (10, 0), (0, 5)):
        made = placed(view, promised_blocks=promised)
        for _ in range(2):
            view.started(made, cached_tokens=reused * 16)
    assert (view.promised_blocks, view.stale_blocks) == (30, 16)
    view.ended(placed(view, promised_blocks=10), busy=True)
    assert (view.promised_blocks, view.stale_blocks) == (30, 16), "who never ran tells nothing"


def test_24_simultaneous_requests_of_4_groups_do_not_scatter() -> None:
    """No worker has said a word yet, and the index knows nothing."""
    view, _ = view_of("a", "b")
    rng, homes = Random(1), dict[int, set[str]]()
    for number in range(24):
        names = [bytes([number % 4, block]) * 8 for block in range(60)]
        score = place(
            PlacementRequest(prompt_tokens=1000), view.candidates(names, 1000, {}), "prefix", rng
        ).chosen
        placed(view, score.address, names=names, tokens=score.uncached_tokens, blocks=2)
        homes.setdefault(number % 4, set()).add(score.worker_id)
    view.check_invariants()
    assert all(len(workers) == 1 for workers in homes.values()), homes
    assert len(set().union(*homes.values())) == 2, "both workers should have groups"


def test_a_lost_stream_voids_what_was_placed_there() -> None:
    view, _ = view_of("a")
    made = placed(view, names=NAMES, tokens=400, blocks=30)
    view.disconnected("a", "stream ended")
    assert view.state(view.workers()[0]) is WorkerState.LOST
    view.ended(made)
    view.accepted("a", hello_of("a", incarnation="a2"))
    assert cached_tokens(view) == {"a": 0}
    assert view.incarnations() == {"a": "a2"}
    view.check_invariants()


def test_a_refused_worker_is_shown_with_its_reason_and_never_used() -> None:
    view, _ = view_of()
    assert view.refused("a", session_pb2.Hello(worker_id="a"), "another model")
    assert not view.refused("a", session_pb2.Hello(worker_id="a"), "another model"), "no news"
    view.disconnected("a", "stream ended")
    (worker,) = view.workers()
    assert (view.state(worker), worker.reason) == (WorkerState.REFUSED, "another model")
    assert view.candidates([], 10, {}) == []


def test_the_index_what_was_just_placed_and_host_memory_are_taken_together_below_the_last_token() -> None:
    view, _ = view_of("a", "b")
    placed(view, "b", names=NAMES[:5])
    view.heard("a", cluster_pb2.WorkerLoad(host_tokens_per_second=5000.0))
    a, b = WorkerId("a"), WorkerId("b")
    depths = {a: CachedDepth(blocks=12, host_blocks=4), b: CachedDepth(blocks=2, host_blocks=5)}
    found = {
        c.worker_id: (c.cached_tokens, c.host_cached_tokens)
        for c in view.candidates(NAMES, PROMPT_TOKENS, depths)
    }
    assert found == {"a": (192, 64), "b": (80, 32)}
    worker = view.candidates(NAMES, 30 * 16, {a: CachedDepth(blocks=2, host_blocks=28)})[0]
    assert (worker.cached_tokens, worker.host_cached_tokens) == (32, 27 * 16)
    assert worker.host_tokens_per_second == 5000.0
    usable = [
        usable_cached_tokens(blocks, tokens, 16) for blocks, tokens in ((4, 64), (4, 65), (2, 65), (9, 1))
    ]
    assert usable == [48, 64, 32, 0], "the last prompt token is always computed"


def test_a_busy_worker_is_left_alone_until_a_place_is_free_and_each_request_frees_one_once() -> None:
    view, clock = view_of("a")
    first, second = sent(view), sent(view)
    view.ended(second, busy=True)
    assert not view.has_room("a")
    view.ended(first)
    assert view.has_room("a")
    sent(view)
    assert not view.has_room("a"), "one place, one request"
    clock.now += 1.0
    assert view.has_room("a"), "a probe in case a word was missed"
    view, _ = view_of("a")
    first, second = sent(view), sent(view)
    view.ended(second, busy=True)
    view.started(first)
    sent(view)
    view.ended(first)
    assert not view.has_room("a"), "it left the queue when it started"


KINDS = ["place", "send", "aside", "start", "end", "busy", "tick", "report", "reconnect"]


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 30)), max_size=60))
def test_sums_and_speculative_names_always_add_up(events: list[tuple[str, int]]) -> None:
    view, clock = view_of("a")
    running: list[Placed] = []
    num_sent = 0
    for kind, number in events:
        one = running[number % len(running)] if running else None
        match kind:
            case "place":
                running.append(placed(view, names=NAMES[:number], tokens=number))
            case "tick":
                clock.now += number / 20
                view.heard("a")
                view.candidates(NAMES, PROMPT_TOKENS, {})
            case "report":
                view.heard("a", cluster_pb2.WorkerLoad(), None if number == 30 else number)
            case "reconnect":
                view.disconnected("a", "stream ended")
                view.accepted("a", session_pb2.Hello(worker_id="a", block_size=16, total_blocks=1000))
            case _ if one is None:
                continue
            case "send" if not one.sent:
                num_sent += 1
                one.handle = num_sent
                view.sent(one)
            case "aside" if not one.sent:
                with view.without(one):
                    view.check_invariants()
            case "start":
                if not one.sent:
                    view.sent(one)
                view.started(one)
            case "end" | "busy":
                running.remove(one)
                view.ended(one, busy=kind == "busy")
        view.check_invariants()
    for one in running:
        view.ended(one)
    clock.now += 10
    view.heard("a")
    assert cached_tokens(view) == {"a": 0}
    assert load(view)[:2] == (0, 0)
    view.check_invariants()


def test_a_draining_worker_is_a_source_of_what_it_hands_over_as_long_as_its_incarnation_is_heard() -> None:
    view, clock = view_of("a")
    view.accepted("b:1", hello_of("b", transfer_port=7, is_draining=True, **KIND))
    holder = Holder("b:1", Incarnation("b1"), 100)
    source = view.holding_source(holder, 101)
    assert source is not None
    assert (source.transfer_address, source.cached_tokens) == ("b:7", 96)
    assert [candidate.worker_id for candidate in view.candidates([], 10, {})] == ["a"]
    assert view.holding_source(holder._replace(incarnation=Incarnation("b0")), 101) is None
    assert view.holding_source(holder._replace(address="a"), 101) is None
    clock.now += 2.0
    assert view.holding_source(holder, 101) is None
    view.heard("b:1")
    assert view.holding_source(holder, 101) == source
    view.disconnected("b:1", "it has ended")
    assert view.holding_source(holder, 101) is None


def test_no_step_delays_a_draining_worker_that_has_handed_its_requests_over() -> None:
    view, _ = view_of("a")
    view.accepted("b:1", hello_of("b", transfer_port=7, **KIND))
    view.heard("b:1", cluster_pb2.WorkerLoad(running=3, steps=10, step_seconds=5.0))
    (worker,) = (one for one in view.workers() if one.worker_id == "b")
    busy = view.pull_source(worker, 6, 101)
    holding = view.holding_source(Holder("b:1", Incarnation("b1"), 100), 101)
    assert busy is not None
    assert busy.step_ms > 0.0
    assert holding == busy, "a worker that preempts goes on with its steps"
    view.draining("b:1")
    holding = view.holding_source(Holder("b:1", Incarnation("b1"), 100), 101)
    assert holding == busy._replace(step_ms=0.0)


def test_a_short_worker_hears_of_one_with_room_and_a_measured_link() -> None:
    view, _ = view_of("a")
    view.accepted("b:1", hello_of("b", transfer_port=7, total_blocks=100, block_bytes=1000, **KIND))
    (worker,) = (one for one in view.workers() if one.worker_id == "b")

    def heard(**load: Any) -> session_pb2.Room:
        able = {"pull_setup_seconds": 0.5, "pull_bytes_per_second": 2000.0, "host_tokens_per_second": 1.0}
        view.heard("b:1", cluster_pb2.WorkerLoad(**(able | load)))
        return view.room(worker)

    room = heard(used_blocks=30)
    assert (room.blocks, room.pull_setup_seconds, room.pull_bytes_per_second) == (60, 0.5, 2000.0)
    assert not view.is_short("b:1")
    assert heard(used_blocks=95).blocks == 0
    assert view.is_short("b:1")
    for unable in ({"waiting": 1}, {"pull_bytes_per_second": 0.0}, {"host_tokens_per_second": 0.0}):
        assert heard(used_blocks=30, **unable).blocks == 0


@given(st.integers(1, 20), st.integers(0, 20))
def test_a_pull_expects_the_step_that_is_most_likely_under_way(num_short: int, num_rounds: int) -> None:
    """A step of 300 ms between short ones of 10 ms weighs as much as the time that it takes."""
    view, _ = view_of("a")
    (worker,) = view.workers()
    steps, seconds = 0, 0.0
    for step_seconds in [*[0.01] * num_short, 0.3] * num_rounds:
        steps, seconds = steps + 1, seconds + step_seconds
        view.heard("a", cluster_pb2.WorkerLoad(steps=steps, step_seconds=seconds, running=1))
    mean_ms = 1000 * seconds / max(steps, 1)
    assert mean_ms * 0.99 <= worker.step_ms <= 300 or not num_rounds
    if num_rounds > 5:
        assert worker.step_ms > 100
    view.heard("a", cluster_pb2.WorkerLoad(steps=steps, step_seconds=seconds))
    assert worker.step_ms == 0
