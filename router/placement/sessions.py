"""Session memory: the worker that last served each session (conversation), as a hint for placement.

Pure. Each router remembers only the sessions that it served itself.
"""

from collections import OrderedDict

from blockyard.proto.index.contract import WorkerId


class SessionMemory:
    """Maps each session to its last worker. Beyond `max_sessions` it forgets the session that was served longest
    ago."""

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._last_worker: OrderedDict[str, WorkerId] = OrderedDict()
        """Ordered by the time at which the session was last served, the latest last."""

    def __len__(self) -> int:
        return len(self._last_worker)

    def served(self, session_id: str, worker_id: WorkerId) -> None:
        self._last_worker[session_id] = worker_id
        self._last_worker.move_to_end(session_id)
        if len(self._last_worker) > self._max_sessions:
            self._last_worker.popitem(last=False)

    def last_worker(self, session_id: str) -> WorkerId | None:
        return self._last_worker.get(session_id)
