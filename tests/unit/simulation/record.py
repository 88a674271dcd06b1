"""Record of what the client of one request saw, and of pieces that do not join."""

from collections.abc import Callable
from dataclasses import dataclass, field

from blockyard.router.generation.attempt import Progress
from blockyard.router.generation.joined_outputs import TokenChunk

from .scenario import Request


@dataclass(slots=True)
class Record:
    """Implements `Client`."""

    request: Request
    router: str
    arrived: float
    on_end: Callable[["Record"], None]
    outputs: list[list[int]] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    outcome: str = ""
    """"finished", or the reason of an error."""
    ended: float = 0.0
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """Time spans in which no token came."""
    defects: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outputs = [[] for _ in range(self.request.n)]

    def take(self, chunk: TokenChunk, progress: Progress, now: float) -> bool:
        tokens = self.outputs[chunk.index]
        if self.outcome:
            self.defects.append("tokens came after the end")
        if chunk.index in self.finished:
            self.defects.append(f"output {chunk.index} went on after its finish")
        if chunk.offset != len(tokens):
            self.defects.append(f"output {chunk.index} goes on at {chunk.offset}, not {len(tokens)}")
        tokens += chunk.token_ids
        self._brought(now)
        if chunk.finish is not None:
            self.finished.add(chunk.index)
        return len(tokens) >= self.request.stop_after.get(chunk.index, 10**9)

    def end(self, outcome: str, now: float) -> None:
        if self.outcome:
            self.defects.append(f"ended twice: {self.outcome}, then {outcome}")
        self.outcome, self.ended = outcome, now
        self._brought(now)
        self.on_end(self)

    def _brought(self, now: float) -> None:
        since = self.pauses[-1][1] if self.pauses else self.arrived
        self.pauses.append((since, now))
