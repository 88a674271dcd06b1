"""Three hosts on one bridge: network namespaces with a Ray node in each, and a cluster of ours on that Ray.

Runs within a network namespace of its own, in which the bridge is, and from which clients call. Host 1 has Ray's head
and Redis, hosts 1 and 2 a router each, and every host a worker. Owns processes and links. Does not own what is done to
them (control_plane_rows.py). All hosts share the machine's files and process ids, but no sockets.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockyard.deploy.machine import state
from blockyard.deploy.machine.processes import command_of, session_members
from blockyard.deploy.machine.redis_server import find_redis_server
from blockyard.deploy.ray.head import SUPERVISOR_TITLE
from blockyard.proto.runtime.niceness import NICENESS_VARIABLE

NUM_HOSTS = 3
BRIDGE = "bridge0"
RAY_PORT, REDIS_PORT = 6379, 6390
START_SECONDS = 120.0
COMMAND_SECONDS = 60.0
NAME = "hosts"
SIMULATED = (
    *("--model", "demo", "--engine", "simulated", "--device", "cpu", "--kv-cache-memory", "18MiB"),
    *("--simulated-step-seconds", "0.02", "--cpus-per-worker", "1", "--workers", "3", "--routers", "2"),
    *("--separate-ports", "--router-port", "7600", "--http-port", "7700", "--router-resource", "router"),
)
JOIN_FOR_EVER = 'until false; do "$@"; sleep 1; done'
"""Starts a Ray node again whenever it ends, as an operator's service manager does."""


def run(command: str) -> str:
    return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host: a network namespace that a sleeping process holds."""

    number: int
    holder: int

    @property
    def address(self) -> str:
        return f"10.78.0.{self.number}"

    @property
    def inside(self) -> tuple[str, ...]:
        """Return the beginning of a command that runs on this host."""
        return ("nsenter", f"--net=/proc/{self.holder}/ns/net")

    def cut(self) -> None:
        """Take the host's link down, as by a pulled plug. Nothing is refused: packets are lost in both directions."""
        self._set_link("down")

    def heal(self) -> None:
        self._set_link("up")

    def _set_link(self, state: str) -> None:
        run(" ".join((*self.inside, f"ip link set link{self.number} {state}")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """A process that Ray has titled, and the number of its host."""

    title: str
    host: int

    @property
    def is_supervisor(self) -> bool:
        return self.title.startswith(SUPERVISOR_TITLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreeHosts:
    """The hosts, by number, and the cluster on them."""

    hosts: dict[int, Host]
    home: Path

    def command(self, *arguments: str, on: int = 1) -> subprocess.CompletedProcess[str]:
        """Run a command of ours on a host."""
        return subprocess.run(
            [
                *self.hosts[on].inside,
                sys.executable,
                "-m",
                "blockyard.deploy.cli",
                *arguments,
                "--cluster",
                NAME,
            ],
            env=os.environ | {state.HOME_VARIABLE: str(self.home)},
            capture_output=True,
            text=True,
            timeout=4 * COMMAND_SECONDS,
            check=False,
        )

    def report(self, on: int = 1) -> dict[str, Any]:
        """Return what `status` tells, whether or not all answer."""
        told = self.command("status", "--output", "json", on=on)
        document: dict[str, Any] = json.loads(told.stdout)
        return document

    def _processes(self, *titles: str) -> dict[int, Actor]:
        """Return the processes on the hosts whose titles begin so, by pid, as the kernel knows them."""
        links = {
            Path(f"/proc/{host.holder}/ns/net").readlink(): number for number, host in self.hosts.items()
        }
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            title = "".join(command_of(int(folder.name))[:1])
            if title.startswith(titles) or title.endswith(titles):
                with contextlib.suppress(OSError):  # It has just ended.
                    if (host := links.get((folder / "ns/net").readlink())) is not None:
                        found[int(folder.name)] = Actor(title=title, host=host)
        return found

    def actors(self) -> dict[int, Actor]:
        """Return workers, routers and supervisors, by pid."""
        return self._processes("ray::WorkerActor", "ray::RouterActor", SUPERVISOR_TITLE)

    def raylets(self) -> dict[int, int]:
        """Return the pid of each host's raylet."""
        return {raylet.host: pid for pid, raylet in self._processes("/raylet").items()}

    def move_supervisor(self, away_from: set[int]) -> None:
        """Kill the supervisor until Ray starts it on another host than these."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert time.monotonic() < deadline, "Ray starts the supervisor on no other host"
            supervisors = {pid: actor for pid, actor in self.actors().items() if actor.is_supervisor}
            for pid, actor in supervisors.items():
                if actor.host in away_from:
                    os.kill(pid, signal.SIGKILL)
                elif len(supervisors) == 1:
                    return
            time.sleep(1.0)


def host_number(address: str) -> int:
    """Return the number of the host that has an address (host:port)."""
    return int(address.partition(":")[0].rpartition(".")[2])


@contextmanager
def three_hosts(folder: Path, *options: str) -> Iterator[ThreeHosts]:
    """Start the hosts, Ray and a cluster, with more options of `up`.

    `folder` needs a short path, because Ray puts sockets in it.
    """
    with ExitStack() as stack:
        run("ip link set lo up")
        run(f"ip link add {BRIDGE} type bridge")
        run(f"ip address add 10.78.0.254/24 dev {BRIDGE}")
        run(f"ip link set {BRIDGE} up")
        hosts = {number: stack.enter_context(_host(number)) for number in range(1, NUM_HOSTS + 1)}
        head = hosts[1]
        redis = (str(find_redis_server()), "--bind", head.address, "--port", str(REDIS_PORT))
        _spawn(
            stack,
            folder / "redis.log",
            head,
            *redis,
            "--requirepass",
            "secret",
            "--save",
            "",
            "--dir",
            str(folder),
        )
        _spawn(
            *(stack, folder / "ray-1.log", head, *_ray(head), "--head", f"--port={RAY_PORT}"),
            *("--include-dashboard=false", f"--temp-dir={folder / 'ray'}", *_resources(router=True)),
        )
        _await(head, f"import socket; socket.create_connection(('{head.address}', {RAY_PORT}), 1)")
        for host in list(hosts.values())[1:]:
            joining = (
                *_ray(host),
                f"--address={head.address}:{RAY_PORT}",
                *_resources(router=host.number == 2),
            )
            _spawn(stack, folder / f"ray-{host.number}.log", host, "sh", "-c", JOIN_FOR_EVER, "sh", *joining)
        cluster = ThreeHosts(hosts=hosts, home=folder / "home")
        _await_nodes(cluster)
        os.environ["BLOCKYARD_REDIS_URL"] = f"redis://:secret@{head.address}:{REDIS_PORT}"
        address = f"{head.address}:{RAY_PORT}"
        up = cluster.command("up", *SIMULATED, "--host", "0.0.0.0", "--address", address, *options)
        assert up.returncode == 0, up.stderr
        yield cluster


@contextmanager
def _host(number: int) -> Iterator[Host]:
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    try:
        own = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{holder.pid}/ns/net").readlink() == own:
            time.sleep(0.02)
        host = Host(number=number, holder=holder.pid)
        run(f"ip link add port{number} type veth peer name link{number}")
        run(f"ip link set link{number} netns {holder.pid}")
        for command in (
            "ip link set lo up",
            f"ip address add {host.address}/24 dev link{number}",
            f"ip link set link{number} up",
        ):
            run(" ".join((*host.inside, command)))
        run(f"ip link set port{number} master {BRIDGE} up")
        yield host
    finally:
        holder.kill()
        holder.wait()


def _ray(host: Host) -> tuple[str, ...]:
    start = ("-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats")
    return (sys.executable, *start, f"--node-ip-address={host.address}", "--object-store-memory=80000000")


def _resources(*, router: bool) -> tuple[str, ...]:
    return ("--num-cpus=2", *(("--resources", json.dumps({"router": 1})) if router else ()))


def _spawn(stack: ExitStack, log_path: Path, host: Host, *command: str) -> subprocess.Popen[bytes]:
    """Start a session on a host, which ends with the stack."""
    quiet = {
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        NICENESS_VARIABLE: "0",
    }
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*host.inside, *command],
            env=os.environ | quiet,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    while members := session_members(process.pid):
        for member in members:
            try:
                os.kill(member.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.poll()
        time.sleep(0.05)


def _await_nodes(cluster: ThreeHosts) -> None:
    ask = (
        f"import ray; ray.init('{cluster.hosts[1].address}:{RAY_PORT}', log_to_driver=False); "
        f"assert sum(node['Alive'] for node in ray.nodes()) == {NUM_HOSTS}"
    )
    _await(cluster.hosts[1], ask)


def _await(host: Host, check: str) -> None:
    """Run a Python text on a host until it ends well."""
    deadline = time.monotonic() + START_SECONDS
    while subprocess.run(
        [*host.inside, sys.executable, "-c", check], capture_output=True, check=False
    ).returncode:
        assert time.monotonic() < deadline, f"not within {START_SECONDS:g} s: {check}"
        time.sleep(0.5)
