"""The memory of sessions is bounded and keeps the ones in use."""

from blockyard.proto.index.contract import WorkerId
from blockyard.router.placement.sessions import SessionMemory


def test_a_session_is_remembered_by_its_last_worker() -> None:
    memory = SessionMemory(10)
    assert memory.last_worker("chat") is None
    memory.served("chat", WorkerId("a"))
    memory.served("chat", WorkerId("b"))
    assert memory.last_worker("chat") == "b"


def test_beyond_the_bound_the_session_used_longest_ago_is_forgotten() -> None:
    memory = SessionMemory(3)
    for session_id in ("1", "2", "3", "1", "4"):
        memory.served(session_id, WorkerId("a"))
    assert len(memory) == 3
    assert [memory.last_worker(session_id) for session_id in "1234"] == ["a", None, "a", "a"]
