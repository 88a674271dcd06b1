"""`blockyard run-batch`: sends a file of requests to a server of OpenAI's API and writes the answers to a file."""

import asyncio
import fcntl
import sys
from collections.abc import Callable
from pathlib import Path

import click
from blockyard.deploy.commands.printing import server_at
from blockyard.deploy.machine import state
from blockyard.deploy.machine.interruption import end_like_ctrl_c
from blockyard.deploy.requests import batch
from blockyard.deploy.requests.openai_server import OpenAIServer
from blockyard.deploy.settings.options import cluster_option
from blockyard.deploy.settings.security import client_connection, connection_options
from blockyard.deploy.settings.setting import wrong_values_are_usage
from blockyard.proto.limits import MAX_PRIORITY
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@click.command(name="run-batch")
@click.option(
    "-i",
    "--input-file",
    "source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="Requests, one per line: custom_id, method, url and body.",
)
@click.option(
    "-o",
    "--output-file",
    "target",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="Answers, one per line, in order of completion. Requests whose answer is already there are skipped.",
)
@click.option(
    "--url",
    metavar="URL",
    help="URL of a server of OpenAI's API. Default: the cluster's own (`up --http-port`).",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1000),
    default=32,
    show_default=True,
    help="Requests in flight at once.",
)
@click.option(
    "--timeout",
    "timeout_seconds",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds for each request.",
)
@click.option(
    "--priority",
    type=click.IntRange(-MAX_PRIORITY, MAX_PRIORITY),
    help="Priority of requests whose body names none. Lower is served earlier. Default: "
    f"{MAX_PRIORITY}, the lowest, on the cluster's own server, and none with --url.",
)
@cluster_option
@connection_options
def run_batch(
    source: Path,
    target: Path,
    url: str | None,
    concurrency: int,
    timeout_seconds: float,
    priority: int | None,
    cluster: str,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Requests may be for completions, chats, embeddings and responses. To continue an interrupted run, give the same
    files. A line that cannot be sent, or that the server refuses, becomes an error in the output. The first error is
    printed, and the exit code is 1."""
    is_ours, url = url is None, url or _own_url(cluster)
    if priority is None and is_ours:
        priority = MAX_PRIORITY
    with target.open("a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is writing to {target}") from None
        end_like_ctrl_c()
        counts = _run(
            source, target, concurrency, priority, lambda: server_at(url, timeout_seconds, is_ours=is_ours)
        )
    click.echo(
        f"{counts.succeeded} answered, {counts.failed} failed, {counts.skipped} skipped (already in {target})",
        err=True,
    )
    if counts.first_failure:
        click.echo(f"first failure: {counts.first_failure}", err=True)
    sys.exit(1 if counts.failed else 0)


def _run(
    source: Path,
    target: Path,
    concurrency: int,
    priority: int | None,
    reached: Callable[[], OpenAIServer],
) -> batch.Counts:
    batch.mend(target)
    with source.open(encoding="utf-8", errors="replace") as file:
        lines = list(batch.read_lines(file))
    try:
        with target.open(encoding="utf-8") as file:
            done = batch.answered_ids(file)
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{target} has a line that is not a batch answer: name another file") from None
    left = [line.with_priority(priority) for line in lines if line.custom_id not in done]
    counts = batch.Counts(total=len(lines), skipped=len(lines) - len(left))
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("lines", total=counts.total, completed=counts.skipped)

        def on_progress() -> None:
            description = f"lines, {counts.failed} failed" if counts.failed else "lines"
            bar.update(task, advance=1, description=description)

        async def answer_all() -> None:
            async with reached() as server:
                await batch.run_batch(
                    server, left, target, concurrency=concurrency, counts=counts, on_progress=on_progress
                )

        asyncio.run(answer_all())
    return counts


def _own_url(cluster: str) -> str:
    """Return the URL of the cluster's HTTP API. Raise ValueError for a cluster without one."""
    remembered = state.load(cluster)
    if not remembered.gateways:
        raise ValueError(
            f"cluster {cluster!r} serves no HTTP: start it with `serve`, or with `up --http-port 8000`, or name "
            "another server with --url"
        )
    with wrong_values_are_usage():
        scheme = "http" if client_connection()["tls"] is None else "https"
    return f"{scheme}://{remembered.gateways[0]}"
