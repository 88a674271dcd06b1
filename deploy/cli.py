"""The `blockyard` command: up, down, status, drain, resume, restart, flush, generate, chat, workers, blocks, index,
size, figures, doctor.

Owns words, tables and exit codes. What is done lives in cluster.py; what is asked goes through the public
gRPC client, so that everything but `up`, `down` and `status` needs neither Ray nor torch. Prints no secret.
"""

import json
import secrets
import sys
from pathlib import Path
from typing import Any

import click
from blockyard.deploy import (
    administration,
    answers,
    figures,
    figures_plots,
    index_view,
    on_ray,
    pool_map,
    size,
    state,
    views,
)
from blockyard.deploy import cluster as clusters
from blockyard.deploy import doctor as doctors
from blockyard.deploy.interruption import end_like_ctrl_c
from blockyard.deploy.limits import limit_options, router_limits
from blockyard.deploy.options import (
    byte_size,
    cluster_option,
    engine_config,
    engine_options,
    model_path,
    output_option,
    placement_options,
    router_option,
    served_name,
)
from blockyard.deploy.progress import StageProgress
from blockyard.deploy.request_options import answer_options, sampling_options
from blockyard.deploy.security import (
    client_connection,
    connection_options,
    security,
    security_options,
    token,
)
from blockyard.deploy.shared_port import MAX_PORT
from blockyard.proto.v1.cluster_pb2 import ClusterInfo
from blockyard.router.client import BlockyardError, Client
from blockyard.router.config import DEFAULT_MAX_BEAM_WIDTH, DEFAULT_MAX_OUTPUTS
from blockyard.worker.pool_map import block_cells
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console, RenderableType

ASK_SECONDS = 10.0
"""For the commands that only look."""
GRACE = click.FloatRange(0, administration.MAX_GRACE_SECONDS)


class _Commands(click.Group):
    """Turns what an operator can act on into one line and exit code 1; anything else is a traceback on
    purpose."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort):
            raise  # RuntimeErrors too, but click's own way to end
        except (BlockyardError, ValueError, RuntimeError, OSError) as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="blockyard")
def main() -> None:
    """A distributed LLM serving cluster: gRPC routers, workers on Ray, one prefix index in Redis."""


main.add_command(token)


@main.command()
@cluster_option
@engine_options
@click.option("--model-name", help="What clients call the model. Default: the last part of --model.")
@click.option("--workers", "num_workers", type=int, help="Default: one for each GPU, or one on the CPU.")
@click.option(
    "--routers", "num_routers", type=int, default=1, show_default=True, help="Each serves any client."
)
@click.option(
    "--router-port",
    type=click.IntRange(0, MAX_PORT),
    default=0,
    help="Where the routers serve; 0 takes a free one.",
)
@click.option(
    "--separate-ports",
    is_flag=True,
    help="A port for each router, from --router-port on, instead of one for all.",
)
@placement_options
@click.option(
    "--max-outputs",
    type=int,
    default=DEFAULT_MAX_OUTPUTS,
    show_default=True,
    help="The most outputs (`n`) that a request may ask for.",
)
@click.option(
    "--max-beam-width",
    type=int,
    default=DEFAULT_MAX_BEAM_WIDTH,
    show_default=True,
    help="The most beams that a request may ask for.",
)
@limit_options
@security_options
@click.option("--cpus-per-worker", type=float, help="Default: the cluster's CPUs in equal shares.")
@click.option("--address", help="An existing Ray cluster, host:port. Default: a local one is started.")
@click.option("--redis-url", envvar="BLOCKYARD_REDIS_URL", help="Default: a private Redis is started.")
@click.option(
    "--router-redis-url",
    envvar="BLOCKYARD_ROUTER_REDIS_URL",
    help="The same Redis as a user that only reads, for routers (SECURITY.md). Default: --redis-url.",
)
def up(cluster: str, **values: Any) -> None:
    """Bring a cluster up and wait until it serves."""
    model_name = values.pop("model_name") or served_name(values["model"])
    options = clusters.UpOptions(
        cluster=cluster,
        engine=engine_config(values),
        model_name=model_name,
        limits=router_limits(values),
        security=security(values),
        **values,
    )
    end_like_ctrl_c()
    with StageProgress() as progress:
        started = clusters.up(options, progress.report)
    _console().print(views.summary(started))


@main.command()
@cluster_option
@click.option("--drain", "drain_seconds", type=float, default=clusters.DRAIN_SECONDS, show_default=True)
@click.option(
    "--forget", is_flag=True, help="Do not ask Ray: for a joined Ray cluster that is gone for good."
)
def down(cluster: str, drain_seconds: float, forget: bool) -> None:
    """Stop everything that `up` started."""
    with StageProgress() as progress:
        clusters.down(state.load(cluster), drain_seconds=drain_seconds, forget=forget, report=progress.report)
    _console().print(f"cluster {cluster} is down, nothing of it is left")


@main.command()
@click.argument("worker")
@click.option("--grace-seconds", type=GRACE, default=administration.GRACE_SECONDS, show_default=True)
@cluster_option
@router_option
@connection_options
@output_option
def drain(worker: str, grace_seconds: float, cluster: str, routers: tuple[str, ...], output: str) -> None:
    """Let WORKER take nothing new, and wait until nothing runs there: what outlives the grace goes on elsewhere."""
    with _client(cluster, routers, ASK_SECONDS) as client:
        moved = client.drain_worker(worker, grace_seconds=grace_seconds)
    _show(output, {"worker": worker, "moved": moved}, administration.drained_line(worker, moved))


@main.command()
@click.argument("worker")
@cluster_option
@router_option
@connection_options
def resume(worker: str, cluster: str, routers: tuple[str, ...]) -> None:
    """Take a drain of WORKER back."""
    with _client(cluster, routers, ASK_SECONDS) as client:
        client.resume_worker(worker)
    _console().print(f"{worker} takes new requests")


@main.command()
@click.argument("worker", required=False)
@cluster_option
@router_option
@connection_options
@output_option
def flush(worker: str | None, cluster: str, routers: tuple[str, ...], output: str) -> None:
    """Empty the prefix cache of WORKER, or of all."""
    with _client(cluster, routers, ASK_SECONDS) as client:
        flushed = client.flush_cache(worker)
    _show(output, _as_dict(flushed), administration.flushed_line(flushed))


@main.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--grace-seconds", type=GRACE, default=administration.GRACE_SECONDS, show_default=True)
@cluster_option
def restart(names: tuple[str, ...], grace_seconds: float, cluster: str) -> None:
    """Restart workers and routers, one after the other, without losing a request. Default: all of them.

    Each drains first, and the next waits until it serves again. A cluster with one router serves nobody while that one
    restarts."""
    with StageProgress() as progress:
        restarted = administration.restart(
            state.load(cluster), names, grace_seconds=grace_seconds, report=progress.report
        )
    _console().print(f"restarted {', '.join(restarted)}")


@main.command()
@cluster_option
@connection_options
@output_option
def status(cluster: str, output: str) -> None:
    """Who should run, who does, and what the routers see."""
    remembered = state.load(cluster)
    with on_ray.driver(remembered):
        report = on_ray.supervisor_report()
    info = _cluster_info(remembered)
    document = {
        "supervisor_pid": report.pid,
        "places": [views.place_dict(place) for place in report.places],
        "cluster": None if info is None else _as_dict(info),
    }
    _show(output, document, views.status_view(remembered, report.places, info))


@main.command()
@cluster_option
@router_option
@connection_options
@output_option
def workers(cluster: str, routers: tuple[str, ...], output: str) -> None:
    """The workers as a router sees them."""
    with _client(cluster, routers, ASK_SECONDS) as client:
        known = client.list_workers()
    _show(output, [_as_dict(worker) for worker in known], views.workers_table(known))


@main.command()
@click.argument("worker", required=False)
@cluster_option
@router_option
@connection_options
@output_option
def blocks(worker: str | None, cluster: str, routers: tuple[str, ...], output: str) -> None:
    """Each worker's block pool as a map, or one worker's."""
    with _client(cluster, routers, ASK_SECONDS) as client:
        names = [worker] if worker else [known.worker_id for known in client.list_workers()]
        pools = [client.block_pool(name) for name in names]
    if output == "json":
        _show(output, [{**_as_dict(pool), "cells": block_cells(pool)} for pool in pools], "")
        return
    for pool in pools:
        _console().print(pool_map.pool_map(pool))


@main.command()
@cluster_option
@router_option
@connection_options
@output_option
def index(cluster: str, routers: tuple[str, ...], output: str) -> None:
    """The prefix index: its state, size and lag, and how fast and how right it is."""
    with _client(cluster, routers, ASK_SECONDS) as client:
        info = client.index_info()
    _show(output, _as_dict(info) | index_view.derived(info), index_view.index_view(info))


@main.command()
@click.argument("prompt")
@cluster_option
@router_option
@connection_options
@output_option
@sampling_options
@answer_options
def generate(
    prompt: str,
    cluster: str,
    routers: tuple[str, ...],
    output: str,
    timeout_seconds: float,
    tenant: str | None,
    **sampling: Any,
) -> None:
    """Continue PROMPT (`-` reads it from stdin), streaming."""
    text = sys.stdin.read() if prompt == "-" else prompt
    with _client(cluster, routers, timeout_seconds, tenant) as client:
        if output == "json":
            answers.print_json(client.generate(text, **sampling))
        elif (sampling["n"] or 1) > 1:
            answers.print_outputs(client.stream(text, **sampling))
        else:
            answers.print_stream(client.stream(text, **sampling))


@main.command()
@click.option("--system", help="The system prompt.")
@cluster_option
@router_option
@connection_options
@sampling_options
def chat(
    system: str | None,
    cluster: str,
    routers: tuple[str, ...],
    timeout_seconds: float,
    tenant: str | None,
    **sampling: Any,
) -> None:
    """Talk with the model, a line at a time; an empty line or Ctrl-D ends it."""
    messages = [{"role": "system", "content": system}] if system else []
    sampling["session_id"] = sampling["session_id"] or f"chat-{secrets.token_hex(8)}"
    with _client(cluster, routers, timeout_seconds, tenant) as client:
        while question := _next_question():
            messages.append({"role": "user", "content": question})
            answer = answers.print_stream(client.stream(messages=messages, **sampling))
            messages.append({"role": "assistant", "content": answer})


@main.command(name="size")
@click.argument("model")
@click.option(
    "--memory",
    callback=byte_size,
    default="60GB",
    metavar="SIZE",
    show_default=True,
    help="Budget of the KV cache.",
)
@click.option("--block-size", type=click.Choice(["16", "32", "64", "128"]), default="16", show_default=True)
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto")
@click.option("--max-model-len", type=int, help="Default: what the model's config says.")
@output_option
def size_command(
    model: str, memory: int, block_size: str, dtype: str, max_model_len: int | None, output: str
) -> None:
    """How many blocks, tokens and requests of MODEL a memory budget holds."""
    sized = size.size_model(
        model_path(model),
        budget_bytes=memory,
        block_size=int(block_size),
        dtype=dtype,
        max_model_len=max_model_len,
    )
    _show(output, sized.as_dict(), views.size_view(sized))


@main.command(name="figures")
@click.option("--output", type=click.Choice(["text", "json", "png"]), default="text", show_default=True)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    show_default="figures",
    help="Where `--output png` puts one picture a figure.",
)
def figures_command(output: str, folder: Path | None) -> None:
    """The textbook figures of paged attention, computed now by the real scheduler and pool; a few seconds."""
    if folder is not None and output != "png":
        raise click.UsageError("--folder is for pictures: add --output png")
    computed = figures.compute_figures()
    if output == "png":
        for path in figures_plots.draw_figures(computed, folder or Path("figures")):
            click.echo(path)
    else:
        _show(output, computed.as_dict(), figures.figures_table(computed))


@main.command()
@click.option("--model", help="Also check this model's folder.")
@click.option("--redis-url", envvar="BLOCKYARD_REDIS_URL")
def doctor(model: str | None, redis_url: str | None) -> None:
    """What on this machine would keep a cluster from serving. Exit code 1 if anything would."""
    findings = []
    for finding in doctors.examine(model_path(model) if model else None, redis_url):
        findings.append(finding)
        _console().print(views.finding_line(finding))
    sys.exit(doctors.exit_code(findings))


def _client(
    cluster: str, routers: tuple[str, ...], timeout_seconds: float, tenant: str | None = None
) -> Client:
    addresses = list(routers or state.load(cluster).routers)
    return Client(addresses, timeout_seconds=timeout_seconds, tenant=tenant, **client_connection())


def _cluster_info(remembered: state.ClusterState) -> ClusterInfo | None:
    """None while no router answers: what the supervisor says is worth showing all the same."""
    try:
        connection = client_connection()
        with Client(list(remembered.routers), timeout_seconds=ASK_SECONDS, retries=0, **connection) as client:
            return client.cluster_info()
    except (BlockyardError, ValueError):
        return None


def _next_question() -> str:
    try:
        return str(input("> " if sys.stdin.isatty() else "")).strip()
    except EOFError:
        return ""


def _show(output: str, document: Any, view: RenderableType) -> None:
    if output == "json":
        click.echo(json.dumps(document, indent=2))
    else:
        _console().print(view)


def _as_dict(message: Message) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _console() -> Console:
    """Made for each use: it looks at stdout, which tests and pipes replace. Never folds a row off a
    terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    return console


if __name__ == "__main__":
    main()
