"""Publisher state: the intervals of the index publisher, and what metrics and operators see of it. Values alone."""

from dataclasses import dataclass

from blockyard.proto.index.contract import Berth, ErrorKind


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherConfig:
    """Intervals of the publisher. Times are in seconds."""

    lease_seconds: float = 3.0
    """Renewed after each third of it. A dead worker's blocks are believed in no longer than this."""
    flush_seconds: float = 0.02
    """How long changes gather before they are sent. Changes that cancel each other meanwhile are never sent."""
    rest_ratio: float = 3.0
    """Length of the pause after a full batch with more to send, as a multiple of the batch's time.

    It leaves room for look-ups where many workers republish at once. It ends at the next renewal of the lease.
    """
    purge_seconds: float = 3.0
    """Pause between two searches for the entries of dead workers."""
    purge_slice_seconds: float = 0.05
    """Pause between two slices of a purge, while it walks over a dead worker's entries."""
    resync_jitter_seconds: float = 0.25
    """Longest random delay of a new registration. It spreads workers that all notice a lost index at once."""
    first_backoff_seconds: float = 0.05
    max_backoff_seconds: float = 1.0
    call_timeout_seconds: float = 2.0
    damage_rest_seconds: float = 3.0
    """Pause of spot checks after damage was found and everything was republished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherState:
    """The publisher's state, for metrics and operators."""

    berth: Berth | None
    num_pending: int
    """Names with a change that the index has not confirmed."""
    num_entries: int
    """Names that the GPU's cache holds."""
    num_anywhere: int
    """Names that the GPU's cache or host memory holds. 0 without a host cache."""
    lag_seconds: float
    """Age of the oldest change that the index has not confirmed. 0 when it knows everything."""
    is_resyncing: bool
    """Whether the index does not know yet all that the caches held when the berth was taken."""
    last_error: ErrorKind | None
    """None once a call has succeeded again."""
    num_errors: int
    num_resyncs: int
    num_damages: int = 0
    """How often the index did not hold what was published."""
