"""Losses: how often a request may lose its worker or fail on it, and the quarantine of prompts that kill workers.

Pure. A request with a token from a worker did not cause that worker's death. If two workers died under a request before
any token, it is a poison. No third worker gets it, and its prompt is refused for a while. A worker given up for
silence, or one that answers again, did not die. Does not own replay (relay.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

from blockyard.router.errors import EngineFailed, PoisonRequest, WorkerLost

DEADLY = 2
"""Number of workers that died under a request before it is a poison, or of failed steps before it fails."""
QUARANTINE_SECONDS = 60.0
"""Time for which requests with a poison's prompt are refused at once."""
MAX_QUARANTINED = 1024

WorkerKey = tuple[str, str]
"""Address and incarnation of a worker."""


@dataclass(slots=True, kw_only=True)
class Losses:
    """Lost workers and failed steps of one request."""

    max_migrations: int
    num: int = 0
    """Number of workers lost, for whatever reason, and of failed steps."""
    _suspicious: list[WorkerKey] = field(default_factory=list)
    """Workers that died before they sent a token of the request, and have not come back."""
    _num_failures: int = 0
    """Failed steps before the worker had sent a token of the request."""

    def add(
        self,
        worker: WorkerKey,
        *,
        is_suspicious: bool,
        is_alive: Callable[[WorkerKey], bool],
        tokens_emitted: int,
    ) -> None:
        """Count a lost worker. Raises PoisonRequest or WorkerLost if no further worker may get the request.

        `is_suspicious`: the worker died before it had sent a token of the request.
        """
        self.num += 1
        metadata = {"tokens_emitted": str(tokens_emitted)}
        if is_suspicious:
            # A worker that is lost again, or is connected again, did not die the first time.
            dead = [earlier for earlier in self._suspicious if earlier != worker and not is_alive(earlier)]
            self._suspicious = [*dead, worker]
        if len(self._suspicious) >= DEADLY:
            raise PoisonRequest(
                f"{len(self._suspicious)} workers died right after they received this request",
                metadata=metadata,
            )
        if self.num > self.max_migrations:
            raise WorkerLost(f"{self.num} workers were lost under this request", metadata=metadata)

    def add_failure(self, *, brought_tokens: bool) -> None:
        """Count a failed step, which ended all requests in it. The worker itself continues.

        `brought_tokens`: the worker had sent a token of the request. Raises EngineFailed if it may not be tried again.
        """
        self.num += 1
        self._num_failures += not brought_tokens
        if self._num_failures >= DEADLY or self.num > self.max_migrations:
            raise EngineFailed("the engine failed on this request")


class Quarantine:
    """Remembers the prompts under which workers died, for QUARANTINE_SECONDS each. One per router."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[bytes, float] = {}
        """End of the quarantine, by sha256 of root and prompt, in order of time."""

    def check(self, prompt: bytes) -> None:
        """Raise PoisonRequest if the prompt is in quarantine."""
        if not self._until:
            return
        now = self._clock()
        for key in [key for key, until in self._until.items() if until <= now]:
            del self._until[key]
        if sha256(prompt).digest() in self._until:
            raise PoisonRequest("workers died under this prompt less than a minute ago")

    def add(self, prompt: bytes) -> None:
        key = sha256(prompt).digest()
        self._until.pop(key, None)
        while len(self._until) >= MAX_QUARANTINED:
            del self._until[next(iter(self._until))]
        self._until[key] = self._clock() + QUARANTINE_SECONDS

    def __len__(self) -> int:
        return len(self._until)
