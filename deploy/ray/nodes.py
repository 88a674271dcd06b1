"""Nodes of a Ray cluster: compares each node's versions, code and reachability with this machine.

The questions are in node_probe.py, and Ray carries them to the nodes. Asking needs a Ray driver (lifecycle/driver.py).
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockyard.deploy.machine.check_results import Finding, Verdict
from blockyard.deploy.ray import node_probe
from blockyard.deploy.ray.node_probe import RECONNECT_VARIABLE
from blockyard.proto.naming.code_version import code_version
from blockyard.proto.runtime.niceness import NICENESS_VARIABLE

PROBE_SECONDS = 60.0
RECONNECT_SECONDS = 600
"""Time for which nodes, and so our workers, keep running after Ray's control service has died. Then they end. Ray's
default of 60 s leaves an operator too little time to notice."""
DYING_SECONDS = 3.0
DYING_TRIES = 4
SHOWN_ID_CHARS = 8
"""Leading characters of a node's id that are shown. They suffice to find the node in Ray's dashboard."""
MUST_BE_EQUAL = ("ray",)
"""Packages that must have equal versions, because Ray refuses another version of itself. Others may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """One living node, as Ray's control service knows it."""

    node_id: str
    name: str
    """Ray's address of the node. If another node has the same, the beginning of its id is added."""
    metrics_address: str
    """Address (host:port) of the node's metrics endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The answers of one living node."""

    address: str
    """Ray's address of the node. If another node has the same, the beginning of its id is added."""
    host: str
    python: str
    packages: Mapping[str, str | None]
    code: str | None
    """Code version. None if the package is missing or too old to report it."""
    has_bfloat16: bool
    """Whether its CPU has bfloat16 instructions."""
    niceness: int
    """Niceness that Ray on this node adds to its workers."""
    reconnect_seconds: float
    """Seconds after which Ray ends everything on this node once its control service has died."""
    model: str | None
    """The problem with the model's files, or empty. None if the node was not asked."""
    redis: str | None
    """The problem with Redis, or empty. None if the node was not asked."""
    unreachable: tuple[str, ...]
    """Other nodes that cannot be reached from this one."""


def living_nodes(service: Any, seconds: float) -> list[RayNode]:
    """Return the living nodes, sorted by name, without asking the nodes. `service` is Ray's control service.

    Raise RayError if the service does not answer.
    """
    from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]

    known = service.get_all_node_info(timeout=seconds).items()
    living = {node_id.hex(): info for node_id, info in known if info.state == GcsNodeInfo.ALIVE}
    names = distinct_names({node_id: info.node_manager_address for node_id, info in living.items()})
    nodes = (
        RayNode(
            node_id=node_id,
            name=names[node_id],
            metrics_address=f"{info.node_manager_address}:{info.metrics_export_port}",
        )
        for node_id, info in living.items()
    )
    return sorted(nodes, key=lambda node: node.name)


def all_node_names() -> dict[str, str]:
    """Return `hostname (address)` of each node by its id, dead nodes too. This process must be connected to Ray."""
    import ray

    return {
        node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        for node in ray.nodes()  # type: ignore[no-untyped-call]
    }


def ask_nodes(
    packages: Sequence[str] = (), model: str | None = None, redis_url: str | None = None
) -> list[NodeFacts]:
    """Ask each living node. Return the answers, sorted by address. Raise RuntimeError if a node does not answer."""
    from ray.exceptions import RayError

    for _ in range(DYING_TRIES):
        try:
            return _ask_living(packages, model, redis_url)
        except RayError as error:
            last = error
            # Ray lists a node that has just died as living for some seconds.
            time.sleep(DYING_SECONDS)
    raise RuntimeError(f"a node does not answer: {type(last).__name__}") from last


def _ask_living(packages: Sequence[str], model: str | None, redis_url: str | None) -> list[NodeFacts]:
    import ray
    from ray import cloudpickle

    living = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
    names = distinct_names(living)
    cloudpickle.register_pickle_by_value(node_probe)  # type: ignore[no-untyped-call]
    try:
        probes = {node_id: _probe_on(node_id) for node_id in living}
        facts = _each(probes, "facts", lambda node_id: (packages, model, redis_url))
        ports = _each(probes, "listen", lambda node_id: (living[node_id],))
        listeners = [(names[node_id], living[node_id], port) for node_id, port in ports.items()]
        unreachable = _each(probes, "unreachable", lambda node_id: (listeners,))
    finally:
        cloudpickle.unregister_pickle_by_value(node_probe)  # type: ignore[no-untyped-call]
    of_all = [
        seconds for node in facts.values() if (seconds := node.pop("reconnect_seconds_of_all")) is not None
    ]
    for node in facts.values():
        node["reconnect_seconds"] = min(of_all, default=node["reconnect_seconds"])
    return [
        NodeFacts(address=name, unreachable=tuple(unreachable[node_id]), **facts[node_id])
        for node_id, name in sorted(names.items(), key=lambda item: item[1])
    ]


def distinct_names(addresses: Mapping[str, str]) -> dict[str, str]:
    """Return each node's name by its id. `addresses` are the nodes' addresses by id.

    A name is the address, followed by the beginning of the id where nodes share an address.
    """
    shared = Counter(addresses.values())
    return {
        node_id: address if shared[address] == 1 else f"{address} ({node_id[:SHOWN_ID_CHARS]})"
        for node_id, address in addresses.items()
    }


def _probe_on(node_id: str) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(node_probe.NodeProbe).options(num_cpus=0, scheduling_strategy=here).remote()


def _each(probes: Mapping[str, Any], method: str, arguments: Any) -> dict[str, Any]:
    """Call a method on all probes at once. Return the results by node id."""
    import ray

    asked = [getattr(probe, method).remote(*arguments(node_id)) for node_id, probe in probes.items()]
    return dict(zip(probes, ray.get(asked, timeout=PROBE_SECONDS), strict=True))


def check_code(nodes: Sequence[NodeFacts]) -> None:
    """Raise ValueError if a node has other code than this command, because its actors would run untested code."""
    ours = code_version()
    for node in nodes:
        if node.code != ours:
            has = (
                f"has blockyard {node.code}"
                if node.code
                else "has no blockyard, or one too old to tell its version"
            )
            raise ValueError(
                f"node {node.address} {has}, this command is {ours}: install the same on every node, or ship it "
                "with --ship-code"
            )


def differ_in_bfloat16(nodes: Sequence[NodeFacts]) -> bool:
    """Tell whether workers on these CPUs would choose different data types."""
    return len({node.has_bfloat16 for node in nodes}) > 1


def reconnect_seconds(nodes: Sequence[NodeFacts]) -> float | None:
    """Return after how many seconds the first node ends once Ray's control service has died. None without nodes."""
    return min((node.reconnect_seconds for node in nodes), default=None)


def short_reconnect(nodes: Sequence[NodeFacts]) -> str | None:
    """Return the warning that nodes end too soon after Ray's control service has died, or None."""
    short = [node for node in nodes if node.reconnect_seconds < RECONNECT_SECONDS]
    if not short:
        return None
    seconds, them = min(node.reconnect_seconds for node in short), ", ".join(node.address for node in short)
    return (
        f"if Ray's control service (gcs_server) dies, Ray ends all workers and routers on {them} after "
        f"{seconds:g} s: start these nodes with {RECONNECT_VARIABLE}={RECONNECT_SECONDS}"
    )


def findings(nodes: Sequence[NodeFacts], here: Mapping[str, str | None], python: str) -> Iterator[Finding]:
    """Yield doctor's lines about each node, compared with the packages and the Python of this machine."""
    if differ_in_bfloat16(nodes):
        without = ", ".join(node.address for node in nodes if not node.has_bfloat16)
        detail = (
            f"no bfloat16 instructions on {without}: workers on CPUs all compute in float32 (see --dtype)"
        )
        yield Finding(verdict="warn", subject="data type", detail=detail)
    if warning := short_reconnect(nodes):
        yield Finding(verdict="warn", subject="ray", detail=warning)
    for node in nodes:
        yield _versions(node, here, python)
        yield _code(node)
        if node.niceness > 0:
            yield _niceness(node)
        if node.model is not None:
            yield _problem(node, "model", node.model, "can be read")
        if node.redis is not None:
            yield _problem(node, "redis", node.redis, "answers")
        others = ", ".join(node.unreachable)
        yield _problem(node, "ports", others and f"takes no connection to {others}", "reaches all nodes")


def _versions(node: NodeFacts, here: Mapping[str, str | None], python: str) -> Finding:
    differences = {
        name: f"{name} {version or 'missing'} (here {here[name] or 'missing'})"
        for name, version in node.packages.items()
        if version != here[name]
    }
    if _minor(node.python) != _minor(python):
        differences["ray"] = f"Python {node.python} (here {python})"
    missing = [name for name in differences if node.packages.get(name) is None]
    verdict: Verdict = "ok"
    if differences:
        verdict = "fail" if missing or any(name in differences for name in MUST_BE_EQUAL) else "warn"
    return _of(node, verdict, ", ".join(differences.values()) or f"Python {node.python}, packages as here")


def _code(node: NodeFacts) -> Finding:
    ours = code_version()
    if node.code == ours:
        return _of(node, "ok", f"code {ours}, as here")
    return _of(node, "warn", f"code {node.code or 'missing'}, here {ours}: `up` needs --ship-code")


def _niceness(node: NodeFacts) -> Finding:
    detail = (
        f"Ray adds {node.niceness} to the niceness of its workers, so other programs take their cores: start the node "
        f"with {NICENESS_VARIABLE}=0"
    )
    return _of(node, "warn", detail)


def _problem(node: NodeFacts, subject: str, problem: str, sound: str) -> Finding:
    return _of(node, "fail" if problem else "ok", f"{subject}: {problem or sound}")


def _of(node: NodeFacts, verdict: Verdict, detail: str) -> Finding:
    return Finding(verdict=verdict, subject=node.address, detail=detail)


def _minor(python: str) -> str:
    return ".".join(python.split(".")[:2])
