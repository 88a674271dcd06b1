"""Watch: reads the links of one rank in a thread, sends pulses, and notices a rank that has ended or is frozen."""

import selectors
import threading
import time
from collections.abc import Callable, Sequence

from blockyard.worker.parallel.link import Frame, Kind, Link, LinkClosed

PULSE_SECONDS = 0.25


class Watch:
    """The thread of some links. It ends with `stop`, or at the first link that is lost."""

    def __init__(
        self,
        links: Sequence[Link],
        *,
        on_frame: Callable[[int, Frame], None],
        on_loss: Callable[[int, str], None],
        longest_silence: Callable[[int], float],
    ) -> None:
        """The callbacks run on the watch's thread, with the index of the link.

        `longest_silence` returns after how many seconds without a frame a link is lost.
        """
        self._links = list(links)
        self._on_frame = on_frame
        self._on_loss = on_loss
        self._longest_silence = longest_silence
        self._silent_seconds = [0.0] * len(self._links)
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the watch without a loss."""
        self._is_stopping = True
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * PULSE_SECONDS)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for index, link in enumerate(self._links):
                try:
                    selector.register(link, selectors.EVENT_READ, index)
                except ValueError:  # It was closed before this thread ran.
                    if not self._is_stopping:
                        self._on_loss(index, "the connection is closed")
                    return
            looked_at = next_pulse = time.monotonic()
            while not self._is_stopping:
                readable = {key.data for key, _ in selector.select(PULSE_SECONDS)}
                now = time.monotonic()
                # Time in which this process itself did not run is no silence of the others.
                passed, looked_at = min(now - looked_at, 2 * PULSE_SECONDS), now
                is_pulse_due = now >= next_pulse
                if is_pulse_due:
                    next_pulse = now + PULSE_SECONDS
                for index, link in enumerate(self._links):
                    try:
                        self._look_at(index, link, index in readable, passed)
                        if is_pulse_due:
                            link.send_pulse()
                    except LinkClosed as error:
                        if not self._is_stopping:
                            self._on_loss(index, str(error))
                        return

    def _look_at(self, index: int, link: Link, is_readable: bool, passed_seconds: float) -> None:
        if is_readable:
            self._silent_seconds[index] = 0.0
            for frame in link.arrived():
                if frame.kind is not Kind.PULSE:
                    self._on_frame(index, frame)
            return
        self._silent_seconds[index] += passed_seconds
        if self._silent_seconds[index] > self._longest_silence(index):
            raise LinkClosed(f"it is silent for {self._silent_seconds[index]:.1f} s")
