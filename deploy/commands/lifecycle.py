"""`blockyard serve`, `up`, `down`, `restart` and `model`: the commands that start and stop processes.

Owns options and output. lifecycle/cluster.py, lifecycle/administration.py and lifecycle/models.py do the work, and
lifecycle/dry_run.py does that of a dry run.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn

import click
from blockyard.deploy.commands.printing import known_cluster, show
from blockyard.deploy.lifecycle import administration, dry_run, hub, models
from blockyard.deploy.lifecycle import cluster as clusters
from blockyard.deploy.lifecycle import driver as on_ray
from blockyard.deploy.lifecycle.log_files import SupervisorLog, logs_of
from blockyard.deploy.lifecycle.progress import StageProgress
from blockyard.deploy.machine import state
from blockyard.deploy.machine.interruption import end_like_ctrl_c, raise_if_asked, undisturbed
from blockyard.deploy.machine.processes import owns_session
from blockyard.deploy.settings import effective
from blockyard.deploy.settings.config_options import own_engine_options, own_engine_settings
from blockyard.deploy.settings.from_vllm import VllmCommand
from blockyard.deploy.settings.options import (
    cluster_option,
    found_option,
    further_model,
    grace_option,
    kept_model,
    model_path,
    output_option,
    text_of,
    waits_option,
)
from blockyard.deploy.settings.setting import checked_by
from blockyard.deploy.settings.up_options import SERVE_PORTS, up_options, up_settings
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.deploy.views import views
from blockyard.deploy.views.quantities import counted
from click.core import ParameterSource

END_LOOK_SECONDS = 1.0
MOST_LOOKS_WITHOUT_RAY = 10
LOG_SECONDS = 5.0
"""Seconds in which a joined Ray cluster must say where the supervisor's log is."""


_dry_run_option = click.option(
    "--dry-run",
    "is_dry",
    is_flag=True,
    help="Start nothing. Show what would run where, with which settings, and every problem that would prevent it. Exit "
    "code 1 if there is a problem.",
)


@click.command(cls=VllmCommand)
@up_settings
@_dry_run_option
@output_option
def up(is_dry: bool, output: str, **values: Any) -> None:
    """Start a cluster and wait until it serves.

    Each setting may also come from the environment, as BLOCKYARD_UP_ and its name, or from a file (--config)."""
    options = up_options(values)
    if is_dry:
        _show_plan(options, output)
    started = _bring_up(options)
    show(output, views.summary_dict(started), views.summary(started))


@click.command(cls=VllmCommand)
@click.argument("given_model", metavar="[MODEL]", required=False)
@up_settings
@_dry_run_option
@output_option
def serve(given_model: str | None, is_dry: bool, output: str, **values: Any) -> None:
    """Serve MODEL over HTTP and gRPC until Ctrl-C or SIGTERM.

    HTTP is OpenAI's API. MODEL is a folder, a hub name, or `demo`; --model adds others. The settings are those of
    `up`; vLLM's names for them work too (docs/cli.md)."""
    if given_model is not None:
        context = click.get_current_context()
        if context.get_parameter_source("model") is ParameterSource.COMMANDLINE:
            values["further_models"] = (values["model"], *values["further_models"])
            context.params["further_models"] = values["further_models"]
            context.set_parameter_source("further_models", ParameterSource.COMMANDLINE)
        context.params["model"] = values["model"] = given_model
        context.set_parameter_source("model", ParameterSource.COMMANDLINE)
    if values["model"] is None:
        raise click.UsageError("Missing argument 'MODEL'.")
    options = up_options(values, default_ports=SERVE_PORTS)
    if is_dry:
        _show_plan(options, output)
    started = _bring_up(options)
    try:
        show(output, views.summary_dict(started), views.serving(started, options))
        wait_for_end(started, incidents_of(started))
    except KeyboardInterrupt:
        pass  # Ctrl-C is the usual end.
    finally:
        ended = started.head is not None or _is_remembered(started)
        if _is_remembered(started):
            with undisturbed(), StageProgress() as progress:
                clusters.down(started, report=progress.report)
        click.echo(_down_words(started) if ended else _lost_words(started), err=True)


def _show_plan(options: UpOptions, output: str) -> NoReturn:
    hub.use_download_dir(options.download_dir)
    context = click.get_current_context()
    settings, plan = effective.effective(context), dry_run.examine(options)
    document = plan.as_dict() | {"configuration": effective.as_document(settings, context)}
    show(output, document, dry_run.plan_view(plan, settings))
    context.exit(0 if plan.would_work else 1)


def _bring_up(options: UpOptions) -> state.ClusterState:
    end_like_ctrl_c()
    hub.use_download_dir(options.download_dir)
    with StageProgress() as progress:
        return clusters.up(options, progress.report)


def incidents_of(started: state.ClusterState) -> Callable[[], Iterable[str]]:
    """Return a function that lists which workers and routers ended or came back since its last call.

    It lists nothing if the supervisor's log cannot be found.
    """
    try:
        log = SupervisorLog(logs_of(started, LOG_SECONDS))
    except ValueError:
        return tuple
    return lambda: log.due_lines(time.monotonic())


def wait_for_end(started: state.ClusterState, incidents: Callable[[], Iterable[str]] = tuple) -> None:
    """Print incidents until another command has taken the cluster down. Raise RuntimeError if Ray has ended."""
    looks_without_ray = 0
    while _is_remembered(started):
        raise_if_asked()
        for line in incidents():
            with suppress(OSError):  # The terminal is gone.
                click.echo(f"{time.strftime('%H:%M:%S')} {line}", err=True)
        time.sleep(END_LOOK_SECONDS)
        head = started.head
        has_ended = head is not None and not owns_session(head.session, head.processes)
        looks_without_ray = looks_without_ray + 1 if has_ended else 0
        # A `down` elsewhere ends Ray a moment before the cluster is forgotten.
        if looks_without_ray > MOST_LOOKS_WITHOUT_RAY:
            raise RuntimeError("the cluster's Ray has ended, and all workers and routers with it")


def _is_remembered(started: state.ClusterState) -> bool:
    """Tell whether no command has taken the cluster down. Write its state file anew if that was lost or damaged.

    A `down` ends the session of a head that we started before it deletes the file. On a joined Ray a missing file
    always counts as a `down`.
    """
    try:
        return state.load(started.cluster).identity == started.identity
    except ValueError as error:
        head = started.head
        runs = head is not None and owns_session(head.session, head.processes)
        if isinstance(error, state.NoSuchClusterError) and not runs:
            return False
        with suppress(OSError):  # The next look tries again.
            state.save(started)
        return True


@click.command()
@cluster_option
@found_option
@click.option(
    "--drain",
    "drain_seconds",
    type=float,
    default=clusters.DRAIN_SECONDS,
    show_default=True,
    help="Seconds for running requests to finish.",
)
@click.option(
    "--forget",
    is_flag=True,
    help="Do not ask Ray, and end nothing there: only forget the cluster. For a joined Ray cluster that is gone.",
)
@output_option
def down(cluster: str, address: str | None, drain_seconds: float, forget: bool, output: str) -> None:
    """Stop everything that `up` started."""
    remembered = known_cluster(cluster, address)
    is_joined, has_ended = remembered.head is None and remembered.ray_address is not None, False
    if is_joined and not forget:
        try:
            on_ray.check_answers(remembered, asks_supervisor=False)
        except state.EndedElsewhereError:
            has_ended = True
    with StageProgress() as progress:
        without_ray = forget or has_ended
        clusters.down(remembered, drain_seconds=drain_seconds, forget=without_ray, report=progress.report)
    if forget and is_joined:
        answering = clusters.answering(remembered)
        document = {"cluster": cluster, "down": False, "forgotten": True, "answering": answering}
        show(output, document, _forgotten_words(remembered, answering))
        return
    words = f"cluster {cluster} had ended before: what was left of it here is removed"
    words = words if has_ended else _down_words(remembered)
    show(output, {"cluster": cluster, "down": True, "elsewhere": remembered.elsewhere}, words)


def _down_words(cluster: state.ClusterState) -> str:
    if not cluster.elsewhere:
        return f"cluster {cluster.cluster} is down: all of its processes have ended"
    return (
        f"all workers and routers of cluster {cluster.cluster} have ended; {cluster.machine} still has "
        f"{', '.join(cluster.elsewhere)}: `blockyard down{state.which(cluster.cluster)}` there removes that"
    )


def _lost_words(cluster: state.ClusterState) -> str:
    return (
        f"cluster {cluster.cluster} is not remembered here any more: `blockyard status --address {cluster.ray_address}"
        f"{state.which(cluster.cluster)}` tells whether it runs"
    )


def _forgotten_words(cluster: state.ClusterState, answering: Sequence[str]) -> str:
    """Return what `down --forget` did on a joined Ray, and what it did not end. `answering` still take connections."""
    private = "its private Redis has ended, and " if cluster.redis is not None else ""
    words = (
        f"cluster {cluster.cluster} is forgotten: {private}its files here are removed. Ray was not asked, and no "
        "worker or router was ended"
    )
    if not answering:
        return f"{words}. Neither Ray at {cluster.ray_address} nor a router takes connections"
    return (
        f"{words}. These still take connections: {', '.join(answering)}. If Ray still runs, `blockyard down --address "
        f"{cluster.ray_address}{state.which(cluster.cluster)}` ends the cluster; if not, it ends with Ray's processes"
    )


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@grace_option
@click.option(
    "--new-files",
    "takes_new_files",
    is_flag=True,
    help="Restart the workers all at once, so that they read files of the model that have changed. Meanwhile the model "
    "is not served. `blockyard model update` needs no pause.",
)
@cluster_option
@found_option
@output_option
def restart(
    names: tuple[str, ...],
    grace_seconds: float,
    takes_new_files: bool,
    cluster: str,
    address: str | None,
    output: str,
) -> None:
    """Restart workers and routers without losing a request.

    Restarts each NAME, one after the other. Default: all of them. Each one drains, restarts and serves again before the
    next one drains. A cluster with one router serves no request while that router restarts. If the files of a model
    have changed since its workers read them, nothing is stopped, unless --new-files is given."""
    remembered = known_cluster(cluster, address)
    on_ray.check_answers(remembered)
    with StageProgress() as progress:
        restarted = administration.restart(
            remembered,
            names,
            grace_seconds=grace_seconds,
            takes_new_files=takes_new_files,
            report=progress.report,
        )
    show(output, {"restarted": restarted}, f"restarted {', '.join(restarted)}")


@click.group()
def model() -> None:
    """Manage the models behind a running cluster's address."""


@model.command("add")
@click.argument("path", metavar="MODEL", callback=checked_by(kept_model))
@click.option("--workers", "num_workers", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--name", "names", multiple=True, help="As --model-name of `up`. May be given more than once.")
@click.option("--tokenizer", metavar="MODEL", callback=checked_by(model_path), help="As in `up`.")
@click.option(
    "--chat-template",
    type=click.Path(dir_okay=False),
    callback=checked_by(text_of),
    help="As in `up`.",
)
@own_engine_options
@click.option(
    "--cpus-per-worker",
    type=click.FloatRange(min=0, min_open=True),
    help="CPUs of each worker. Default: for each rank as many as the cluster's first model has.",
)
@waits_option
@cluster_option
@found_option
@output_option
def add_model(
    path: str,
    num_workers: int,
    names: tuple[str, ...],
    tokenizer: str | None,
    chat_template: str | None,
    cpus_per_worker: float | None,
    waits_for_nodes: bool,
    cluster: str,
    address: str | None,
    output: str,
    **own: Any,
) -> None:
    """Serve MODEL too, on workers of its own.

    Settings without an option here are those of the cluster. Requests choose a model by `model`."""
    settings = own_engine_settings(own)
    remembered = known_cluster(cluster, address)
    on_ray.check_answers(remembered)
    served = further_model(path, names=names, tokenizer=tokenizer, chat_template=chat_template)
    with StageProgress() as progress:
        added = models.add(
            remembered,
            served,
            num_workers=num_workers,
            settings=settings,
            cpus_per_worker=cpus_per_worker,
            waits_for_nodes=waits_for_nodes,
            report=progress.report,
        )
    show(output, asdict(added), models.added_line(added))


@model.command("remove")
@click.argument("name", metavar="NAME")
@grace_option
@cluster_option
@found_option
@output_option
def remove_model(name: str, grace_seconds: float, cluster: str, address: str | None, output: str) -> None:
    """Stop serving the model NAME, and end its workers.

    New requests for it get NOT_FOUND at once. Running ones may finish during the grace period. Requests that name no
    model go to the next one from then. The last model cannot be removed."""
    remembered = known_cluster(cluster, address)
    on_ray.check_answers(remembered)
    with StageProgress() as progress:
        models.remove(remembered, name, grace_seconds=grace_seconds, report=progress.report)
    show(output, {"removed": name}, f"{name} is not served any more")


@model.command("update")
@click.argument("name", metavar="NAME")
@click.option(
    "--path",
    metavar="MODEL",
    callback=checked_by(model_path),
    help="Folder or hub name of the new files. Default: the model's own, where its files have changed.",
)
@click.option(
    "--workers",
    "num_workers",
    type=click.IntRange(min=1),
    help="New workers. Default: as many as the model has.",
)
@grace_option
@waits_option
@cluster_option
@found_option
@output_option
def update_model(
    name: str,
    path: str | None,
    num_workers: int | None,
    grace_seconds: float,
    waits_for_nodes: bool,
    cluster: str,
    address: str | None,
    output: str,
) -> None:
    """Serve the model NAME from other files, without a pause.

    New workers start beside those of now, with the same settings. Once they serve, requests for NAME go to them, and
    the old ones drain and end. So there must be room for both. If a new worker does not start, NAME is served as
    before. Adapters end: add them again."""
    remembered = known_cluster(cluster, address)
    on_ray.check_answers(remembered)
    with StageProgress() as progress:
        updated = models.update(
            remembered,
            name,
            path,
            num_workers=num_workers,
            grace_seconds=grace_seconds,
            waits_for_nodes=waits_for_nodes,
            report=progress.report,
        )
    show(output, asdict(updated), models.added_line(updated))


@model.command("list")
@cluster_option
@found_option
@output_option
def list_models(cluster: str, address: str | None, output: str) -> None:
    """List the models of a cluster. Requests that name none go to the first one."""
    remembered = known_cluster(cluster, address)
    on_ray.check_answers(remembered)
    found = models.list_models(remembered)
    lines = (f"{one.id}: {one.serving} of {counted(len(one.workers), 'worker')} serve" for one in found)
    show(output, [asdict(one) for one in found], "\n".join(lines))
