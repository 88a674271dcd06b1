"""`make demo`: starts a cluster on this machine, runs 24 real chats on it, and shows the block pools.

Owns the order of the demo and its output. Uses the same `up` and `down` as the command line. Nothing is faked: the
model generates all answers.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from blockyard.deploy.demo.prompts import DEMO_GROUPS
from blockyard.deploy.demo.traffic import ALONE_ROUNDS, Chat, LatencyAlone, chats_of, run_chats, time_alone
from blockyard.deploy.lifecycle import driver as on_ray
from blockyard.deploy.lifecycle.cluster import down, leftovers, up
from blockyard.deploy.lifecycle.progress import StageProgress
from blockyard.deploy.machine.interruption import end_like_ctrl_c, undisturbed
from blockyard.deploy.machine.state import ClusterState
from blockyard.deploy.settings.options import model_path
from blockyard.deploy.settings.up_options import SERVE_PORTS
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.deploy.views import views
from blockyard.deploy.views.pool_map import cells_of_map, pool_map
from blockyard.router.client import BlockyardError, Client
from blockyard.worker.config import EngineConfig
from blockyard.worker.inspection.pool_map import block_cells
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

CLUSTER = "demo"
NUM_WORKERS = 2
KV_CACHE_BYTES = 18 * 2**20
"""Memory for 384 blocks of this model in float32, or 768 in bfloat16, so that each block is visible."""
AGREE_SECONDS = 5.0
"""Limit on the wait for equal views of a pool. A worker writes its map each second. The dashboard reads that file."""
REPORTED_CHATS = 6
"""Without a terminal, a line is printed each time that this many more chats have finished."""
TAIL_CHARACTERS = 88
DASHBOARD_SECONDS = 10.0


def main() -> None:
    """Run the demo. Exit with code 0 if every request was served and nothing unwanted is left behind."""
    parser = argparse.ArgumentParser(prog="python -m blockyard.deploy.demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the cluster serving")
    keep = parser.parse_args().keep
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    end_like_ctrl_c()
    code = 1
    try:
        code = run(console, keep=keep)
    except* KeyboardInterrupt:
        console.print("interrupted; everything that was started has been stopped")
        code = 130
    except* (BlockyardError, RuntimeError, ValueError, OSError) as group:
        console.print(
            f"the demo failed, and everything that it started has been stopped: {group.exceptions[0]}",
            markup=False,
        )
    sys.exit(code)


def run(console: Console, *, keep: bool) -> int:
    started_at = time.monotonic()
    asks = not keep and console.is_terminal and sys.stdin.isatty()
    with StageProgress() as progress:
        cluster = up(demo_options(may_stay=keep or asks), progress.report)
    kept = False
    try:
        _show_chats(console, cluster)
        _show_pools(console, cluster)
        if keep or asks:
            _show_dashboard(console, cluster)
        kept = keep or (asks and _is_wanted_on())
    finally:
        if not kept:
            with undisturbed(), StageProgress() as progress:
                down(cluster, report=progress.report)
    return _farewell(console, cluster, kept=kept, seconds=time.monotonic() - started_at)


def demo_options(*, may_stay: bool) -> UpOptions:
    """Return the demo's options. A cluster that may keep serving uses the examples' ports, or the next free ones."""
    options = UpOptions(
        cluster=CLUSTER,
        engine=EngineConfig(model=model_path("demo"), device="cpu", kv_cache_memory=KV_CACHE_BYTES),
        model_names=("demo",),
        num_workers=NUM_WORKERS,
    )
    if not may_stay:
        return options
    return replace(options, movable_ports=frozenset(SERVE_PORTS), **SERVE_PORTS)  # type: ignore[arg-type]


def _is_wanted_on() -> bool:
    """Ask the user whether the cluster should keep serving. It serves meanwhile."""
    try:
        return input("leave it serving? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _show_chats(console: Console, cluster: ClusterState) -> None:
    chats = [chat for group in DEMO_GROUPS for chat in chats_of(group)]
    console.rule(
        f"{len(chats)} chats in {len(DEMO_GROUPS)} groups, each group under one system prompt", align="left"
    )
    routers = list(cluster.routers)
    if console.is_terminal:
        with Live(_panel(chats), console=console, refresh_per_second=8, vertical_overflow="crop") as live:
            asyncio.run(run_chats(routers, chats, lambda chat: live.update(_panel(chats))))
    else:
        asyncio.run(run_chats(routers, chats, _line_printer(console, chats)))
    console.rule("tokens and times of each request", align="left")
    console.print(_requests_table(chats))
    followers = [chat for chat in chats if chat.number > 1]
    reused = sum(1 for chat in followers if chat.finish is not None and chat.finish.cached_tokens > 0)
    moved = "" if reused == len(followers) else "; the others went to a less busy worker"
    console.print(
        f"{reused} of {len(followers)} reused the cached prompt of the first chat in their group{moved}"
    )
    console.print(
        f"their first tokens come late because all {len(followers)} arrived at once and waited for each other; "
        "the first chat of each group found idle workers",
        soft_wrap=True,
    )
    if (alone := asyncio.run(time_alone(routers, chats[0]))) is not None:
        console.print(alone_line(alone), soft_wrap=True)


def alone_line(alone: LatencyAlone) -> str:
    """Return a line that compares one request, alone on the cluster, with and without its prompt in the cache."""
    new_ms, cached_ms = 1000 * alone.new_seconds, 1000 * alone.cached_seconds
    return (
        f"one request alone, median of {ALONE_ROUNDS}: first token after {new_ms:.0f} ms with nothing cached, "
        f"after {cached_ms:.0f} ms with {alone.cached_tokens} of its {alone.prompt_tokens} prompt tokens cached"
    )


def _panel(chats: list[Chat]) -> Table:
    """Return a table with a line for each chat: the end of its text so far."""
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(no_wrap=True, overflow="crop")
    for chat in chats:
        tail = " ".join(chat.text.split())[-TAIL_CHARACTERS:]
        style = "bright_black" if chat.finish is None else "green"
        table.add_row(chat.name, Text(tail or "...", style=style))
    return table


def _line_printer(console: Console, chats: list[Chat]) -> Callable[[Chat], None]:
    """Return a callback that prints the first chat line by line, and then how many chats are done."""
    shown, num_reported = chats[0], 0
    console.print(f"{shown.name} asks: {shown.question}\n", markup=False, soft_wrap=True)

    def on_text(chat: Chat) -> None:
        nonlocal num_reported
        if chat is shown:
            *lines, rest = chat.text[chat.unread_from :].split("\n")
            if chat.finish is not None:
                lines, rest = [*lines, rest, ""], ""
            chat.unread_from = len(chat.text) - len(rest)
            for line in lines:
                console.print(line, markup=False, soft_wrap=True)
        num_done = sum(each.finish is not None for each in chats)
        is_due = num_done >= num_reported + REPORTED_CHATS or num_reported < num_done == len(chats)
        if shown.finish is not None and is_due:
            num_reported = num_done
            console.print(f"{num_done} of {len(chats)} chats are done")

    return on_text


def _requests_table(chats: list[Chat]) -> RenderableType:
    headings = ("request", "group", "worker", "prompt tokens", "cached tokens", "first token ms", "tokens/s")
    rows = []
    for chat in chats:
        finish, first_seconds = chat.finish, chat.time_to_first_token_seconds
        assert finish is not None, "run_chats returned, so every stream has ended"
        counts = (str(finish.prompt_tokens), str(finish.cached_tokens))
        first = "-" if first_seconds is None else f"{first_seconds * 1000:.0f}"
        rows.append(
            (chat.name, chat.group, finish.worker_id, *counts, first, f"{chat.tokens_per_second:.0f}")
        )
    return views.plain_table(headings, rows)


def _show_pools(console: Console, cluster: ClusterState) -> None:
    console.rule("the workers' block pools", align="left")
    with on_ray.driver(cluster):  # nothing is printed in here: it would go to stderr with Ray's words
        nodes = {replica.name: replica.node_id for replica in on_ray.supervisor_report().replicas}
    with Client(list(cluster.routers)) as client:
        for worker in client.list_workers():
            console.print(pool_map(client.block_pool(worker.worker_id)))
            agreed = _views_agree(cluster, client, worker.worker_id, nodes[worker.worker_id])
            verdict = "show the same blocks" if agreed else "DIFFER"
            console.print(f"GetBlockPool, `blockyard blocks` and the dashboard's log {verdict}\n")
            if not agreed:
                raise RuntimeError(f"the views of {worker.worker_id}'s pool differ")


def _views_agree(cluster: ClusterState, client: Client, worker_id: str, node_id: str) -> bool:
    """Tell whether GetBlockPool, the log and `blockyard blocks` show the same blocks of a worker.

    Wait up to AGREE_SECONDS for the log, because its map is up to a second old.
    """
    deadline = time.monotonic() + AGREE_SECONDS
    while time.monotonic() < deadline:
        by_call = block_cells(client.block_pool(worker_id))
        by_log = cells_of_map(_dashboard_log(cluster, node_id, f"blockyard-{worker_id}.log"))
        if by_call == by_log:
            return _cells_by_command(worker_id) == by_call
        time.sleep(0.2)
    return False


def _cells_by_command(worker_id: str) -> str:
    command = [sys.executable, "-m", "blockyard.deploy.cli", "blocks", worker_id, "--cluster", CLUSTER]
    answer = subprocess.run(
        [*command, "--output", "json"], capture_output=True, check=True, text=True, timeout=60
    )
    return str(json.loads(answer.stdout)[0]["cells"])


def _dashboard_log(cluster: ClusterState, node_id: str, filename: str) -> str:
    """Return what the dashboard's Logs tab shows of a log file, from the same API call."""
    assert cluster.ray_token_path is not None, "the demo starts its own Ray"
    query = urllib.parse.urlencode({"node_id": node_id, "filename": filename, "lines": 1000})
    token = Path(cluster.ray_token_path).read_text(encoding="ascii")
    request = urllib.request.Request(
        f"{cluster.dashboard_url}/api/v0/logs/file?{query}", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=DASHBOARD_SECONDS) as answer:
        return str(answer.read().decode("utf-8"))


def _show_dashboard(console: Console, cluster: ClusterState) -> None:
    console.rule("the Ray dashboard", align="left")
    for line in (*views.dashboard_lines(cluster), *views.metrics_lines(cluster)):
        console.print(line, soft_wrap=True)
    console.print(
        "see       Logs: blockyard-worker-0.log is the pool's map, rewritten each second (press refresh)\n"
        "          Actors: worker-0, worker-1, router-0 and the supervisor, with their processes and logs"
    )


def _farewell(console: Console, cluster: ClusterState, *, kept: bool, seconds: float) -> int:
    console.rule("done", align="left")
    if kept:
        console.print(views.summary(cluster), soft_wrap=True)
        return 0
    left = leftovers(cluster)
    if left:
        console.print(f"left behind: {', '.join(left)}")
        return 1
    console.print(
        f"everything has been stopped: no process and no file is left ({seconds:.0f} s in all)\n"
        "try next:  make demo KEEP=1            the same, and the cluster keeps serving\n"
        "           .venv/bin/blockyard --help  a cluster of your own: blockyard serve FOLDER"
    )
    return 0


if __name__ == "__main__":
    main()
