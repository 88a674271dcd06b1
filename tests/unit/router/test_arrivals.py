"""A prompt that has just reached a worker counts as cached there on every router, for a while."""

from blockyard.proto.index.contract import WorkerId
from blockyard.proto.naming.block_hash import chain
from blockyard.proto.naming.marks import marks
from blockyard.proto.v1 import session_pb2
from blockyard.router.cluster.arrivals import KEEP_SECONDS, Arrivals
from blockyard.router.cluster.depths import CachedDepth
from blockyard.router.cluster.view import ClusterView
from hypothesis import given
from hypothesis import strategies as st

from .prompt import Clock

NAMES = chain(bytes(16), range(40 * 16), 16)
OTHERS = chain(bytes(16), range(7, 7 + 40 * 16), 16)
EVENTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from([NAMES, OTHERS]), st.integers(0, 40), st.floats(0, 4)),
    max_size=30,
)


@given(EVENTS)
def test_each_worker_has_the_deepest_prefix_of_the_last_seconds(events):
    clock = Clock()
    arrivals = Arrivals[str](clock)
    for worker, names, depth, seconds in events:
        arrivals.add(worker, marks(names[:depth], 16))
        arrivals.check_invariants()
        clock.now += seconds
    expected: dict[str, int] = {}
    arrived = clock.now
    for worker, names, depth, seconds in reversed(events):
        arrived -= seconds
        if names is NAMES and arrived + KEEP_SECONDS > clock.now + 1e-6 and depth // 8:
            expected[worker] = max(expected.get(worker, 0), depth // 8 * 8)
    assert arrivals.depths(NAMES, 16) == expected


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 40), st.booleans(), st.floats(0, 4)), max_size=30
    )
)
def test_what_a_worker_withdraws_is_forgotten_until_it_arrives_again(events):
    clock = Clock()
    arrivals, until = Arrivals[str](clock), dict[tuple[str, int], float]()
    for worker, depth, is_withdrawn, seconds in events:
        told, depths = marks(NAMES[:depth], 16), range(8, depth + 1, 8)
        if is_withdrawn:
            arrivals.withdraw(worker, told)
        else:
            arrivals.add(worker, told)
        for marked in depths:
            until[worker, marked] = 0.0 if is_withdrawn else clock.now + KEEP_SECONDS
        clock.now += seconds
        expected: dict[str, int] = {}
        for (name, marked), time in until.items():
            if time > clock.now:
                expected[name] = max(expected.get(name, 0), marked)
        assert arrivals.depths(NAMES, 16) == expected
        arrivals.check_invariants()


@given(st.lists(st.binary(max_size=40), max_size=40))
def test_a_worker_that_reports_much_fills_no_memory(reports: list[bytes]) -> None:
    arrivals = Arrivals[str](Clock(), max_marks=10)
    for packed in reports:
        arrivals.add("a", packed)
        arrivals.check_invariants()
        assert len(arrivals) <= 10


def view_of(clock: Clock) -> ClusterView:
    view = ClusterView(suspect_seconds=1e9, lost_seconds=2e9, clock=clock)
    view.accepted("a:1", hello("a"))
    return view


def hello(incarnation: str) -> session_pb2.Hello:
    return session_pb2.Hello(worker_id="a", incarnation=incarnation, block_size=16)


def test_an_arrival_raises_what_the_index_says_and_never_lowers_it() -> None:
    view = view_of(Clock())
    view.arrived("a:1", marks(NAMES, 16))
    arrived = view.arrived_depths(NAMES, 16)
    assert arrived == {"a:1": 40}
    worker = WorkerId("a")
    for known, on_gpu, host in (
        (CachedDepth(), 40, 0),
        (CachedDepth(blocks=10, host_blocks=32), 40, 2),
        (CachedDepth(blocks=41), 41, 0),
    ):
        (candidate,) = view.candidates(NAMES, 16 * 60, {worker: known}, arrived)
        assert (candidate.cached_tokens, candidate.host_cached_tokens) == (16 * on_gpu, 16 * host)
    view.check_invariants()


def test_arrivals_end_with_their_incarnation() -> None:
    view = view_of(Clock())
    view.arrived("a:1", marks(NAMES, 16))
    view.arrived("unknown:1", marks(NAMES, 16))
    view.accepted("a:1", hello("b"))
    assert view.arrived_depths(NAMES, 16) == {}
