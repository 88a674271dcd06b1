"""Adapter: a LoRA adapter as scheduler and engine know it. Pure data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """One adapter's content, whatever names it has. Equal content is one object on a worker."""

    fingerprint: str
    """Hash of its content, as in the root of the names of its blocks."""
    rank: int
    num_bytes: int
    """Bytes of its weights on the host."""
    weights: object | None = None
    """The weights in the runner's form. None on a simulated engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentAdapter:
    """An adapter in a slot of the device, as routers see it."""

    fingerprint: str
    rank: int
    num_bytes: int
    load_seconds: float
    """Time that its last load took. 0 until it was measured."""
    running: int
    """Running sequences that use it."""
    requests_per_second: float = 0.0
    """Rate at which requests name it, an average that decays."""
