"""Questions under one system prompt, asked by threads again and again while a test changes the cluster."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from blockyard.router.client import Client, Completion

from tests.system.harness import Cluster, eventually

NUM_STREAMS = 4


WAIT_SECONDS = 60.0


SYSTEM = (
    "You complete Python code. Keep to the style of the file, and add no comment that says what the code says. "
    * 3
)


QUESTIONS = tuple(f"Write function number {number}." for number in range(6))


def ask(client: Client, question: str, *, max_tokens: int = 100, model: str | None = None) -> Completion:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return client.generate(
        messages=messages,
        max_tokens=max_tokens,
        ignore_eos=True,
        seed=7,
        timeout_seconds=120.0,
        model=model,
    )


@dataclass
class Load:
    """Streams that ask the questions again and again until `stop`."""

    client: Client
    model: str | None = None
    answers: list[tuple[str, Completion]] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, first: int) -> None:
        turn = first
        while not self.stop.is_set():
            question = QUESTIONS[turn % len(QUESTIONS)]
            self.answers.append((question, ask(self.client, question, model=self.model)))
            turn += 1


@contextmanager
def load(cluster: Cluster, model: str | None = None) -> Iterator[Load]:
    """Run the load inside the context, and raise what any stream raised."""
    with cluster.client() as client, ThreadPoolExecutor(max_workers=NUM_STREAMS) as threads:
        running = Load(client, model)
        streams: list[Future[None]] = [threads.submit(running.run, first) for first in range(NUM_STREAMS)]
        try:
            assert eventually(lambda: len(running.answers) >= NUM_STREAMS, seconds=WAIT_SECONDS)
            yield running
        finally:
            running.stop.set()
        for stream in streams:
            stream.result()
