"""`blockyard logs`: prints the logs of a cluster's processes, merged by time.

Owns following the logs, and their prefixes and colours. lifecycle/log_files.py finds the logs, and machine/log_lines.py
parses their lines.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import cycle

import click
from blockyard.deploy.commands.printing import known_cluster
from blockyard.deploy.lifecycle.log_files import LogFile, Logs, logs_of
from blockyard.deploy.machine.deadline import Budget
from blockyard.deploy.machine.interruption import end_like_ctrl_c, raise_if_asked
from blockyard.deploy.machine.log_lines import Line, LineReader, merged
from blockyard.deploy.settings.options import cluster_option, found_option

LOOK_SECONDS = 0.5
FIND_SECONDS = 5.0
"""Seconds after which `-f` looks for new processes again."""
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_red")


@click.command()
@click.argument("worker", required=False)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines until Ctrl-C.")
@click.option(
    "--request", "request_id", metavar="ID", help="Print only lines about the request with this id."
)
@click.option(
    "-n",
    "--tail",
    "num_lines",
    type=click.IntRange(0),
    help="Print only this many of the last lines. Default: all.",
)
@click.option(
    "--prefix/--no-prefix",
    "has_prefix",
    default=None,
    help="Begin each line with the name of its process. Default: yes, unless WORKER is given.",
)
@cluster_option
@found_option
def logs(
    worker: str | None,
    follow: bool,
    request_id: str | None,
    num_lines: int | None,
    has_prefix: bool | None,
    cluster: str,
    address: str | None,
) -> None:
    """Print the logs of all processes, merged by time.

    WORKER chooses one of them: a worker with all its ranks, one rank such as "worker-0 rank 1", a router, or
    `supervisor`. Processes that have ended are included."""
    budget, remembered = Budget.of_this_process(), known_cluster(cluster, address)
    found = logs_of(remembered, budget.step_seconds())
    printer = _Printer(has_prefix if has_prefix is not None else worker is None)
    reading = _Reading(found, worker, request_id)
    end_like_ctrl_c()
    with suppress(KeyboardInterrupt):
        printer.print(_last(merged(reading.new_lines(to_the_end=not follow)), num_lines))
        while follow:
            raise_if_asked()
            time.sleep(LOOK_SECONDS)
            printer.print(merged(reading.new_lines(to_the_end=False)))


class _Reading:
    """Reads the logs of the chosen processes. Each call returns the lines since the last one."""

    def __init__(self, logs: Logs, worker: str | None, request_id: str | None) -> None:
        """Raise ValueError for a name that no process has."""
        self._logs = logs
        self._worker = worker
        self._request_id = request_id
        self._readers: dict[str, LineReader] = {}
        self._files = self._found()
        self._found_at = time.monotonic()

    def new_lines(self, *, to_the_end: bool) -> list[Iterator[Line]]:
        if time.monotonic() - self._found_at > FIND_SECONDS:
            with suppress(ConnectionError):  # Ray may answer next time.
                self._files = self._found()
            self._found_at = time.monotonic()
        return [
            self._reader(file).read(self._logs.lines(file, to_the_end=to_the_end)) for file in self._files
        ]

    def _found(self) -> list[LogFile]:
        files = self._logs.files()
        chosen = [file for file in files if self._worker in (None, file.name, file.name.partition(" ")[0])]
        if not chosen and self._worker is not None:
            known = ", ".join(sorted({file.name for file in files})) or "none"
            raise ValueError(f"no log has the name {self._worker!r} (known: {known})")
        return chosen

    def _reader(self, file: LogFile) -> LineReader:
        if file.key not in self._readers:
            self._readers[file.key] = LineReader(file.name, self._request_id)
        return self._readers[file.key]


class _Printer:
    def __init__(self, has_prefix: bool) -> None:
        self._has_prefix = has_prefix
        self._colours = cycle(COLOURS)
        self._colour_of: dict[str, str] = {}

    def print(self, lines: Iterable[Line]) -> None:
        for line in lines:
            click.echo(f"{self._prefix(line.name)}{line.text}")

    def _prefix(self, name: str) -> str:
        if not self._has_prefix:
            return ""
        if name not in self._colour_of:
            self._colour_of[name] = next(self._colours)
        return click.style(f"{name:<10} ", fg=self._colour_of[name])


def _last(lines: Iterable[Line], num_lines: int | None) -> Iterable[Line]:
    return lines if num_lines is None else deque(lines, maxlen=num_lines)
