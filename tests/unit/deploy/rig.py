"""Helpers of the tests of `deploy`: commands in this process, options, states, reports and printed views."""

import json
import logging
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import click
from blockyard.deploy.cli import main
from blockyard.deploy.lifecycle.cluster_spec import spec_of
from blockyard.deploy.lifecycle.shape import Shape
from blockyard.deploy.machine.processes import ProcessIdentity
from blockyard.deploy.machine.state import ClusterState, HeadState, RedisState, save
from blockyard.deploy.settings.up_options import SERVE_PORTS, UP_PORTS, up_options
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.deploy.supervision.replicas import ClusterSpec, Replica, SupervisorReport
from blockyard.proto.runtime.logs import TextFormatter, about
from click.testing import CliRunner, Result
from rich.console import Console, RenderableType

ROOT = Path(__file__).parents[3]
CHECKPOINT = ROOT / "deploy" / "demo_model" / "checkpoint"
SECRET = "a-secret-that-nobody-may-see"
ONE_WORKER = Shape(num_workers=1, num_cpus=1.0, num_gpus=0.0)
JOB, OTHER_JOB = "01000000", "02000000"
HEAD = HeadState(session=7, processes=(ProcessIdentity(pid=7, start_ticks=1),))


def run(line: str, *more: str, **options: Any) -> Result:
    """Run `blockyard` in this process, with the words of a shell's line and further arguments as they are."""
    return CliRunner().invoke(main, [*shlex.split(line), *more], **options)


def document(line: str, *more: str) -> Any:
    """Return what a command prints for programs."""
    result = run(line, *more, "--output", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(line: str, *more: str, code: int = 2) -> str:
    """Return what a command that is refused says, without its line breaks."""
    result = run(line, *more)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def options_of(line: str, *more: str) -> UpOptions:
    """Return what a `serve` or `up` wants."""
    command, *arguments = shlex.split(line)
    context = main.commands[command].make_context(command, [*arguments, *more], parent=click.Context(main))
    values: dict[str, Any] = dict(context.params)
    values["model"] = values.pop("given_model", None) or values["model"]
    del values["is_dry"], values["output"]
    with context:
        return up_options(values, default_ports=SERVE_PORTS if command == "serve" else UP_PORTS)


def spec(options: UpOptions) -> ClusterSpec:
    """Return what the supervisor of a cluster with these options is told."""
    return spec_of(ClusterState(cluster=options.cluster, model="demo", secret=SECRET), options, ONE_WORKER)


def cluster_state(**changes: Any) -> ClusterState:
    """Return the state of a cluster whose head, Redis and router are gone."""
    values: dict[str, Any] = {
        "cluster": "trial",
        "model": "demo",
        "secret": SECRET,
        "redis_url": f"redis://:{SECRET}@127.0.0.1:1/0",
        "routers": ("127.0.0.1:1",),
        "head": HEAD,
        "redis": RedisState(process=ProcessIdentity(pid=8, start_ticks=2), port=1, log_path="redis.log"),
    }
    return ClusterState(**{**values, **changes})


def report_of(*replicas: Replica, **changes: Any) -> SupervisorReport:
    """Return a supervisor's report of replicas that have a CPU each."""
    values = {"pid": 1, "code": "c", "cpus_per_worker": 1.0, "gpus_per_worker": 0.0, "at_seconds": 0.0}
    return SupervisorReport(replicas=[*replicas], **{**values, **changes})


def printed(*views: RenderableType, width: int = 200) -> str:
    """Return what views print, one below the other, without colours."""
    output = StringIO()
    console = Console(file=output, width=width, highlight=False)
    for view in views:
        console.print(view)
    return output.getvalue()


@contextmanager
def listening() -> Iterator[int]:
    """Yield a port of 127.0.0.1 on which the kernel takes connections, and no process reads them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def dead_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port: int = closed.getsockname()[1]
        return port


def log_record(
    created: float, message: str, request_id: str = "", formatter: logging.Formatter | None = None
) -> str:
    """Return a line as a process of ours writes it at a time, in seconds."""
    made = logging.LogRecord("blockyard.trial", logging.INFO, "", 0, message, (), None)
    made.created, made.msecs = created, created % 1 * 1000
    with about(request_id):
        return (formatter or TextFormatter()).format(made) + "\n"


def _age(path: Path) -> int:
    return int(path.suffix[1:])


class LogWriter:
    """An actor's log, as Ray writes and rotates it."""

    def __init__(self, folder: Path, name: str, pid: int, job: str = JOB) -> None:
        self.path = folder / f"worker-{pid:056x}-{job}-{pid}.err"
        self.num_lines = 0
        self.path.write_text(f":job_id:{job}\n:actor_name:{name}\n")

    def write(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text)

    def write_line(self) -> None:
        self.write(log_record(1000 + self.num_lines, f"line {self.num_lines}"))
        self.num_lines += 1

    def rotate(self) -> None:
        aged = sorted(self.path.parent.glob(f"{self.path.name}.*"), key=_age, reverse=True)
        for path in aged:
            path.rename(path.with_suffix(f".{_age(path) + 1}"))
        self.path.rename(f"{self.path}.1")
        self.path.touch()


def logs_of_trial(under: Path) -> Path:
    """Return a folder with the logs of a cluster called `trial`, and of another that has joined its Ray."""
    folder = under / "logs"
    folder.mkdir()
    for number, name in enumerate(("supervisor(1 workers, 1 routers)", "router-0", "worker-0(demo)")):
        LogWriter(folder, name, 100 + number).write(
            log_record(2000 + number, f"of {name[:6]}", f"req-{number}")
        )
    LogWriter(folder, "worker-0(demo)", 90).write(log_record(1000, "of a former life"))
    for number, name in enumerate(("supervisor(2 workers, 1 routers)", "worker-1(demo)")):
        LogWriter(folder, name, 200 + number, OTHER_JOB).write(log_record(3000, "of another cluster"))
    (folder / "raylet.out").write_text("of Ray\n")
    where = {"ray_address": "127.0.0.1:1", "logs_directory": str(folder)}
    save(cluster_state(redis=None, redis_url=None, **where))
    return folder
