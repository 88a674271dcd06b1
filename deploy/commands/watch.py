"""`blockyard top`: shows the workers live.

Owns polling, the terminal and the keys. views/top.py owns what is shown. All data comes through the public client.
"""

import json
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import click
from blockyard.deploy.commands.printing import asking, connected, console
from blockyard.deploy.machine.interruption import end_like_ctrl_c, raise_if_asked
from blockyard.deploy.settings.options import cluster_option, output_option, router_option
from blockyard.deploy.settings.security import connection_options
from blockyard.deploy.views import top as tops
from blockyard.router.client import BlockyardError, Client
from rich.console import Console
from rich.live import Live
from rich.text import Text

ASK_SECONDS = 3.0
"""Time limit of one poll."""
QUIT_KEYS = frozenset("qQ\x03\x04\x1b")


@click.command()
@click.option(
    "--interval",
    "interval_seconds",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between two polls.",
)
@click.option(
    "--once", is_flag=True, help="Poll twice, one interval apart, show the rates between them, and end."
)
@cluster_option
@router_option
@connection_options
@output_option
def top(interval_seconds: float, once: bool, cluster: str, routers: tuple[str, ...], output: str) -> None:
    """Show the workers live: load, memory, hits, tokens per second.

    `q` or Ctrl-C ends it. Hits are the share of prompt tokens read from cached blocks since the last poll, or since
    the worker's start if no prompt came. The columns in/s and out/s are prompt and generated tokens per second.

    If stdout is not a terminal, it shows one screen, as with --once, and ends. `--output json` prints one document per
    line until its reader ends."""
    if once or (output == "text" and not sys.stdout.isatty()):
        with asking(cluster, routers, extra_seconds=interval_seconds) as client:
            _show_once(client, interval_seconds, output)
        return
    with connected(cluster, routers, ASK_SECONDS) as client:
        end_like_ctrl_c()
        with suppress(KeyboardInterrupt):
            if output == "json":
                _print_documents(client, interval_seconds)
            else:
                _show_live(client, interval_seconds, console())


def look(client: Client) -> tops.Look:
    info, workers = client.cluster_info(), client.list_workers()
    return tops.Look(at_seconds=time.monotonic(), info=info, workers=tuple(workers))


def _show_once(client: Client, interval_seconds: float, output: str) -> None:
    before = look(client)
    time.sleep(interval_seconds)
    now = look(client)
    rows, totals = tops.rows_of(now, before), tops.totals_of(now, before)
    if output == "json":
        click.echo(json.dumps(tops.as_document(now, rows, totals)))
    else:
        shown = console()
        shown.print(tops.screen(now, rows, [tops.total_rate(rows)], columns=shown.width, totals=totals))


def _print_documents(client: Client, interval_seconds: float) -> None:
    before = None
    while True:
        raise_if_asked()
        try:
            now = look(client)
        except BlockyardError as error:
            click.echo(json.dumps({"error": str(error)}))
        else:
            rows, totals = tops.rows_of(now, before), tops.totals_of(now, before)
            click.echo(json.dumps(tops.as_document(now, rows, totals)))
            before = now
        time.sleep(interval_seconds)


def _show_live(client: Client, interval_seconds: float, shown: Console) -> None:
    """Redraw the screen after each poll. While no router answers, show the last screen with the error below it."""
    rates: deque[float] = deque(maxlen=tops.MAX_HISTORY)
    now = before = None
    trouble = ""
    with _keys(), Live(console=shown, screen=shown.is_terminal, auto_refresh=False) as live:
        while True:
            raise_if_asked()
            try:
                now, before, trouble = look(client), now, ""
            except BlockyardError as error:
                trouble = f"{error}; retrying every {interval_seconds:g} s"
            if now is None:
                live.update(Text(trouble, "red"), refresh=True)
            else:
                rows = tops.rows_of(now, before)
                if not trouble:
                    rates.append(tops.total_rate(rows))
                totals = tops.totals_of(now, before)
                screen = tops.screen(
                    now, rows, list(rates), columns=shown.width, totals=totals, trouble=trouble
                )
                live.update(screen, refresh=True)
            if _asked_to_quit(interval_seconds):
                return


@contextmanager
def _keys() -> Iterator[None]:
    """Let a terminal on stdin deliver single keys without Enter. Restore its settings at the end."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _asked_to_quit(seconds: float) -> bool:
    """Wait for a quit key, at most this many seconds. Return whether one was pressed."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0] and sys.stdin.read(1) in QUIT_KEYS:
            return True
    return False
