"""Notice for a request without an answer: what it waits for, and a command that shows more or helps.

Owns the text, and printing it once per request on stderr. Does not own calling the routers (commands/generate.py) or
how long a request waits (router/config.py).
"""

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import closing

import click
from blockyard.deploy.views.quantities import counted
from blockyard.deploy.views.views import command_name, state_name
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import BlockyardError, Delta

SILENCE_SECONDS = 3.0
"""Time without a first token after which the notice is printed. Most first tokens arrive sooner."""


def with_waiting_notice(
    deltas: Generator[Delta, None, None],
    workers: Callable[[], Iterable[cluster_pb2.Worker]],
    which: str,
    *,
    silence_seconds: float = SILENCE_SECONDS,
) -> Generator[Delta, None, None]:
    """Yield `deltas` unchanged, and print a notice if the first one takes longer than `silence_seconds`.

    `workers` asks a router, from another thread. `which` are the options with which commands find this cluster.
    """
    has_begun = threading.Event()

    def tell() -> None:
        try:
            line = waiting_line(workers(), which)
        except (BlockyardError, ValueError):
            # The token may not list workers, the router is gone, or the client has been closed.
            line = f"no answer yet; `{command_name()} workers{which}` shows which workers take requests"
        if not has_begun.is_set():
            click.echo(f"[{line}]", err=True)

    timer = threading.Timer(silence_seconds, tell)
    timer.daemon = True
    timer.start()
    try:
        with closing(deltas):
            for delta in deltas:
                has_begun.set()
                timer.cancel()
                yield delta
    finally:
        has_begun.set()
        timer.cancel()


def waiting_line(workers: Iterable[cluster_pb2.Worker], which: str) -> str:
    """Return a sentence on what a request without an answer waits for, and a command that shows more or helps."""
    known = list(workers)
    command = command_name()
    ready = [worker for worker in known if worker.state == cluster_pb2.WORKER_STATE_READY]
    if ready:
        running, waiting = (sum(count) for count in zip(*map(_load, ready), strict=True))
        return (
            f"no answer yet: {len(ready)} of {counted(len(known), 'worker')} take requests, "
            f"with {running} running and {waiting} waiting there; `{command} top{which}` shows them"
        )
    states = ", ".join(f"{worker.worker_id or worker.address} {state_name(worker)}" for worker in known)
    drained = [worker for worker in known if worker.state == cluster_pb2.WORKER_STATE_DRAINING]
    problem = f"waiting for a worker: none takes requests ({states or 'the router knows no worker'}); "
    if drained:
        return f"{problem}`{command} resume {drained[0].worker_id}{which}` undoes a drain"
    return f"{problem}`{command} status{which}` shows why"


def _load(worker: cluster_pb2.Worker) -> tuple[int, int]:
    return worker.load.running, worker.load.waiting
