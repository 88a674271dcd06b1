"""How often a request has lost its worker, and when it is given up: the budget, and the quarantine.

Pure. A request that has brought a token on a worker is taken for a bystander of that worker's end. One under which two
workers died before it brought any is taken for what killed them: it is tried on no third, and neither is the same
prompt for a while. Who was given up for silence, or answers again, had not died. Does not own replay (relay.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

from blockyard.router.errors import EngineFailed, PoisonRequest, WorkerLost

DEADLY = 2
"""Deaths that make a request a poison."""
QUARANTINE_SECONDS = 60.0
"""How long the same prompt is refused at once."""
MAX_QUARANTINED = 1024

Life = tuple[str, str]
"""A worker's address and incarnation."""


@dataclass(slots=True, kw_only=True)
class Losses:
    """Of one request."""

    max_migrations: int
    num: int = 0
    """Workers lost, for whatever reason."""
    _suspicious: list[Life] = field(default_factory=list)
    """Those lost before they had brought a token."""
    _num_failures: int = 0
    """Of the engine, before it had brought a token."""

    def add(
        self, life: Life, *, is_suspicious: bool, is_alive: Callable[[Life], bool], tokens_emitted: int
    ) -> None:
        """`is_suspicious`: the worker ended before it had brought a token. Raises PoisonRequest, WorkerLost."""
        self.num += 1
        metadata = {"tokens_emitted": str(tokens_emitted)}
        if is_suspicious:
            # Who is lost a second time, or is connected again, had not died the first time.
            dead = [earlier for earlier in self._suspicious if earlier != life and not is_alive(earlier)]
            self._suspicious = [*dead, life]
        if len(self._suspicious) >= DEADLY:
            raise PoisonRequest(
                f"{len(self._suspicious)} workers died as soon as they had this request", metadata=metadata
            )
        if self.num > self.max_migrations:
            raise WorkerLost(f"{self.num} workers were lost under this request", metadata=metadata)

    def add_failure(self, *, brought_tokens: bool) -> None:
        """A step that it was in has failed, and with it all requests of that step; the worker lives on. Raises
        EngineFailed."""
        self.num += 1
        self._num_failures += not brought_tokens
        if self._num_failures >= DEADLY or self.num > self.max_migrations:
            raise EngineFailed("the engine failed on this request")


class Quarantine:
    """Prompts that killed workers, for a while. One for each router."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[bytes, float] = {}
        """By a hash of the prompt, in order of time."""

    def check(self, prompt: bytes) -> None:
        """Raises PoisonRequest."""
        if not self._until:
            return
        now = self._clock()
        for key in [key for key, until in self._until.items() if until <= now]:
            del self._until[key]
        if sha256(prompt).digest() in self._until:
            raise PoisonRequest("workers died under this very prompt a short while ago")

    def add(self, prompt: bytes) -> None:
        key = sha256(prompt).digest()
        self._until.pop(key, None)
        while len(self._until) >= MAX_QUARANTINED:
            del self._until[next(iter(self._until))]
        self._until[key] = self._clock() + QUARANTINE_SECONDS

    def __len__(self) -> int:
        return len(self._until)
