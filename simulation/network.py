"""Wires between hosts, with faults on demand: delayed, cut, cut in one direction, and torn.

A wire keeps the order of its messages, as TCP does. Messages sent while a direction is cut arrive after it is healed,
unless one side has hung up meanwhile. Owns paths (a pair of hosts) and wires (one direction of one connection). Does
not own the messages (calls.py).
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulation.virtual_time import OUTSIDE, VirtualLoop

KEEPALIVE_SECONDS = 3.0
"""A worker's gRPC server ends a connection that answers no ping for this long: 2 s and 1 s."""


@dataclass(eq=False, slots=True)
class Path:
    """The way between a router's host and a worker's address."""

    latency_seconds: float
    jitter_seconds: float = 0.0
    is_up_cut: bool = False
    """Whether messages from the router to the worker wait."""
    is_down_cut: bool = False
    cut_number: int = 0
    wires: list["Wire"] = field(default_factory=list)
    on_dead: list[Callable[[], None]] = field(default_factory=list)
    """Called for each connection when keepalive finds the path dead."""

    @property
    def is_whole(self) -> bool:
        return not (self.is_up_cut or self.is_down_cut)


class Network:
    """Owns all paths of one run."""

    def __init__(self, loop: VirtualLoop, chance: random.Random, *, latency_seconds: float = 0.0005) -> None:
        """Create the network. A message takes `latency_seconds` one way on a new path."""
        self.loop = loop
        self.chance = chance
        self._latency_seconds = latency_seconds
        self._paths: dict[tuple[str, str], Path] = {}

    def path(self, host: str, address: str) -> Path:
        return self._paths.setdefault((host, address), Path(self._latency_seconds))

    def paths(self) -> list[Path]:
        return list(self._paths.values())

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        self.loop.call_later(seconds, action, context=OUTSIDE)

    def cut(self, path: Path, *, up: bool, down: bool) -> None:
        path.is_up_cut, path.is_down_cut = up, down
        path.cut_number += 1
        number = path.cut_number

        def check() -> None:
            if path.cut_number == number:
                for end in tuple(path.on_dead):
                    end()

        self.later(KEEPALIVE_SECONDS, check)

    def heal(self, path: Path) -> None:
        path.is_up_cut = path.is_down_cut = False
        path.cut_number += 1
        for wire in tuple(path.wires):
            wire.flow()


class Wire:
    """One direction of a connection."""

    def __init__(
        self, network: Network, path: Path, *, is_up: bool, deliver: Callable[[Any], object]
    ) -> None:
        self._network, self._path = network, path
        self._is_up = is_up
        self._deliver = deliver
        self._carried: deque[tuple[float, Any]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._last_due = 0.0
        path.wires.append(self)

    def __len__(self) -> int:
        return len(self._carried)

    def send(self, item: Any) -> None:
        path, now = self._path, self._network.loop.time()
        seconds = path.latency_seconds + path.jitter_seconds * self._network.chance.random()
        self._last_due = max(self._last_due, now + seconds)
        self._carried.append((self._last_due, item))
        self.flow()

    def tear(self) -> None:
        """Lose every message in flight."""
        self._carried.clear()

    def close(self) -> None:
        self.tear()
        if self in self._path.wires:
            self._path.wires.remove(self)

    def flow(self) -> None:
        if self._timer is None and self._carried and not self._is_cut:
            due = max(self._carried[0][0], self._network.loop.time())
            self._timer = self._network.loop.call_at(due, self._arrive, context=OUTSIDE)

    @property
    def _is_cut(self) -> bool:
        return self._path.is_up_cut if self._is_up else self._path.is_down_cut

    def _arrive(self) -> None:
        self._timer = None
        now = self._network.loop.time() + 1e-9
        while self._carried and self._carried[0][0] <= now and not self._is_cut:
            self._deliver(self._carried.popleft()[1])
        self.flow()
