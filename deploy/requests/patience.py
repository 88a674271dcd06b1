"""What a command says while no answer comes: who or what is waited for, and the command that looks into it or ends it.

Owns when that is said, on stderr, once for each request, and its words. Does not own asking the routers
(commands/ask.py) nor how long a request waits (router/config.py).
"""

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import closing

import click
from blockyard.deploy.views.quantities import counted
from blockyard.deploy.views.views import command_name, state_name
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import BlockyardError, Delta

PATIENCE_SECONDS = 3.0
"""Longer than most first tokens take, and shorter than anybody wonders."""


def told_while_waiting(
    deltas: Generator[Delta, None, None],
    workers: Callable[[], Iterable[cluster_pb2.Worker]],
    which: str,
    *,
    patience_seconds: float = PATIENCE_SECONDS,
) -> Generator[Delta, None, None]:
    """The same deltas. `workers` asks a router, from another thread; `which` is what the named commands need to find
    this cluster."""
    has_begun = threading.Event()

    def tell() -> None:
        try:
            line = waiting_line(workers(), which)
        except (BlockyardError, ValueError):
            # A token that may only ask the model, a router that has gone, or a client that was closed meanwhile.
            line = f"no answer yet; `{command_name()} workers{which}` shows who takes requests"
        if not has_begun.is_set():
            click.echo(f"[{line}]", err=True)

    timer = threading.Timer(patience_seconds, tell)
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
    """What a request without an answer waits for."""
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
    told = f"waiting for a worker: none takes requests ({states or 'the router knows of none'}); "
    if drained:
        return f"{told}`{command} resume {drained[0].worker_id}{which}` takes a drain back"
    return f"{told}`{command} status{which}` says why"


def _load(worker: cluster_pb2.Worker) -> tuple[int, int]:
    return worker.load.running, worker.load.waiting
