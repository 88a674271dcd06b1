"""Pulls: the price of fetching a prefix from another worker instead of computing it.

    time_ms = setup_ms + bytes / bytes_per_ms,   bytes = those of the tokens + those that both ends still move

The rates are measured by the destination. Until they are known nothing is pulled. Pure. Does not own the other terms of
the cost (scoring.py) or who has cached what (cluster/view.py).
"""

from typing import NamedTuple

from blockyard.proto.index.contract import Incarnation, WorkerId

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

    def time_ms(self, tokens: int, lending_bytes: int) -> float:
        """Return the time to fetch this many tokens from a source that still has `lending_bytes` to send."""
        return (
            self.setup_ms
            + (tokens * self.token_bytes + self.pulling_bytes + lending_bytes) / self.bytes_per_ms
        )


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
    """Cost of the same placement without a pull, less its cost with it."""

    @property
    def patience_seconds(self) -> float:
        """Return the time after which the request should go on without the rest."""
        return PATIENCE * self.time_ms / 1000 + PATIENCE_SECONDS
