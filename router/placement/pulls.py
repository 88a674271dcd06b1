"""Pulls: the price of fetching a prefix from another worker instead of computing it.

    time_ms = setup_ms + (pulled_tokens * token_bytes + moving_bytes) / bytes_per_ms

Both ends still have `moving_bytes` to move. `setup_ms` is the measured one, or half a step of each end if that is
longer, since both engines act between two steps.

The rates are measured by the destination. Until they are known nothing is pulled. Pure. Does not own the other terms of
the cost (scoring.py) or who has cached what (cluster/known_workers.py).
"""

from enum import Enum, auto
from typing import NamedTuple

from blockyard.proto.index.contract import Incarnation, WorkerId

LEAST_GAIN = 0.25
"""A pull must save its request more than this part of its own time, since it may take longer than estimated."""
PATIENCE = 2.0
"""A request waits for a pull at most this many times as long as estimated."""
PATIENCE_SECONDS = 0.05
"""Time that is added to that, for what no estimate knows, such as the step that the source is in."""


class PullSource(NamedTuple):
    """A worker that has more of a prompt cached than others."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    """Its session address, which is unique."""
    transfer_address: str
    """The address "host:port" at which other workers fetch blocks."""
    cached_tokens: int
    """Leading prompt tokens that it has on its GPU or in host memory."""
    lending_bytes: int = 0
    """Bytes that it still has to send."""
    step_ms: float = 0.0
    """Time of the step that it is likely to be in. 0 while it is idle."""
    kind: int = 0
    """Number of the kind of its blocks. Only workers of this kind fetch from it."""


class Holder(NamedTuple):
    """A worker that has handed a request over. It still has the blocks that it computed for it."""

    address: str
    """Its session address."""
    incarnation: Incarnation
    tokens: int
    """Tokens of the prompt and of all outputs that it has computed."""


class Link(NamedTuple):
    """Measured way by which blocks reach one worker."""

    setup_ms: float = 0.0
    """Time until a source answers."""
    bytes_per_ms: float = 0.0
    """Rate at which blocks then arrive. 0: not measured yet."""
    token_bytes: float = 0.0
    """Bytes of a token's KV."""
    pulling_bytes: int = 0
    """Bytes that are still to arrive."""
    step_ms: float = 0.0
    """Average time of the worker's own steps. 0 while it is idle."""

    def time_ms(self, tokens: int, source: PullSource) -> float:
        """Return the time to fetch this many tokens from a source."""
        num_bytes = tokens * self.token_bytes + self.pulling_bytes + source.lending_bytes
        return max(self.setup_ms, (self.step_ms + source.step_ms) / 2) + num_bytes / self.bytes_per_ms


UNKNOWN_LINK = Link()


class PullPlan(NamedTuple):
    """A pull that belongs to a placement."""

    source: PullSource
    num_blocks: int
    """Leading blocks of the prompt that the source has."""
    num_bytes: int
    """Bytes to move."""
    time_ms: float
    """Estimated time."""
    saved_ms: float
    """Estimated time to the first token on this worker without a pull, less that with it."""

    def pays(self, tie_ms: float) -> bool:
        """Return whether it saves more than a tie, and more than its time may be wrong."""
        return self.saved_ms > max(tie_ms, LEAST_GAIN * self.time_ms)

    @property
    def patience_seconds(self) -> float:
        """Return the time after which the request should go on without the rest."""
        return PATIENCE * self.time_ms / 1000 + PATIENCE_SECONDS


class PullVerdict(Enum):
    """Whether a worker would fetch from a source, and why not."""

    CHOSEN = auto()
    TIE = auto()
    """It saves too little (`PullPlan.pays`)."""
    OTHER_SOURCE = auto()
    """The chosen source saves as much, or more."""
    UNMEASURED = auto()
    """The worker has not measured its link or its host memory yet, or has no host memory for blocks."""
    MEMORY = auto()
    """The worker's memory is short: a copy would make others wait for room."""


class PullOption(NamedTuple):
    """One source for one worker, as ExplainPlacement shows it."""

    source: PullSource
    verdict: PullVerdict
    pulled_tokens: int = 0
    time_ms: float = 0.0
    saved_ms: float = 0.0
    """Estimated time to the first token without this pull, less that with it. Negative where the pull takes longer."""
