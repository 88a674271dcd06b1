"""Which worker served each conversation last: a hint for placement, of bounded size.

Pure. Other routers have a memory of their own; what they know of the conversation is what the index shows.
"""

from collections import OrderedDict

from blockyard.proto.index.contract import WorkerId


class SessionMemory:
    """Forgets the session that was used longest ago, once there are too many."""

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._last_worker: OrderedDict[str, WorkerId] = OrderedDict()
        """The session used last comes last."""

    def __len__(self) -> int:
        return len(self._last_worker)

    def served(self, session_id: str, worker_id: WorkerId) -> None:
        self._last_worker[session_id] = worker_id
        self._last_worker.move_to_end(session_id)
        if len(self._last_worker) > self._max_sessions:
            self._last_worker.popitem(last=False)

    def last_worker(self, session_id: str) -> WorkerId | None:
        return self._last_worker.get(session_id)
