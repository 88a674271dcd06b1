"""The nodes of a Ray cluster as they are: each one's versions, code and reach, and what of it keeps us from serving.

Owns the comparison with what runs here. The questions are node_probe.py's; how they reach the nodes is Ray's. Works
inside `on_ray.driver`.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockyard.deploy.machine.findings import Finding, Verdict
from blockyard.deploy.ray import node_probe
from blockyard.proto.naming.code_version import code_version

PROBE_SECONDS = 60.0
DYING_SECONDS = 3.0
DYING_TRIES = 4
SHOWN_ID_CHARS = 8
"""Of a node's id: enough to find it in Ray's dashboard."""
MUST_BE_EQUAL = ("ray",)
"""Ray refuses another version of itself; of the others a difference is worth a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """One living node, as Ray's control service knows it."""

    node_id: str
    name: str
    """As NodeFacts.address."""
    metrics_address: str
    """host:port of what its actors' metrics leave by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What one living node said."""

    address: str
    """By which it is told apart from the others: what Ray calls it, with the beginning of its id where another node has
    the same."""
    host: str
    python: str
    packages: Mapping[str, str | None]
    code: str | None
    """None: no package of ours, or one that cannot say."""
    has_bfloat16: bool
    """Of its CPU."""
    model: str | None
    """What is wrong with the model's files; None if they were not asked for."""
    redis: str | None
    unreachable: tuple[str, ...]
    """The other nodes that take no connection from this one."""


def living_nodes(service: Any, seconds: float) -> list[RayNode]:
    """Ordered by name. `service` is ray_head.control_service's; asks no node anything. Raises RayError."""
    from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]

    known = service.get_all_node_info(timeout=seconds).items()
    living = {node_id.hex(): info for node_id, info in known if info.state == GcsNodeInfo.ALIVE}
    names = told_apart({node_id: info.node_manager_address for node_id, info in living.items()})
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
    """Return `hostname (address)` of each node by its id, dead nodes too. Only where this process is on Ray."""
    import ray

    return {
        node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        for node in ray.nodes()  # type: ignore[no-untyped-call]
    }


def ask_nodes(
    packages: Sequence[str] = (), model: str | None = None, redis_url: str | None = None
) -> list[NodeFacts]:
    """Of each living node, ordered by address. Raises RuntimeError for one that does not answer."""
    from ray.exceptions import RayError

    for _ in range(DYING_TRIES):
        try:
            return _ask_living(packages, model, redis_url)
        except RayError as error:
            last = error
            time.sleep(
                DYING_SECONDS
            )  # Ray counts a node that has just died among the living for some seconds
    raise RuntimeError(f"a node does not answer: {type(last).__name__}") from last


def _ask_living(packages: Sequence[str], model: str | None, redis_url: str | None) -> list[NodeFacts]:
    import ray
    from ray import cloudpickle

    living = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
    names = told_apart(living)
    cloudpickle.register_pickle_by_value(node_probe)  # type: ignore[no-untyped-call]
    try:
        probes = {node_id: _probe_on(node_id) for node_id in living}
        facts = _each(probes, "facts", lambda node_id: (packages, model, redis_url))
        ports = _each(probes, "listen", lambda node_id: (living[node_id],))
        everybody = [(names[node_id], living[node_id], port) for node_id, port in ports.items()]
        unreachable = _each(probes, "unreachable", lambda node_id: (everybody,))
    finally:
        cloudpickle.unregister_pickle_by_value(node_probe)  # type: ignore[no-untyped-call]
    return [
        NodeFacts(address=name, unreachable=tuple(unreachable[node_id]), **facts[node_id])
        for node_id, name in sorted(names.items(), key=lambda item: item[1])
    ]


def told_apart(addresses: Mapping[str, str]) -> dict[str, str]:
    """A name for each node, by its id: its address, which nodes on one machine share."""
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
    """All at once."""
    import ray

    asked = [getattr(probe, method).remote(*arguments(node_id)) for node_id, probe in probes.items()]
    return dict(zip(probes, ray.get(asked, timeout=PROBE_SECONDS), strict=True))


def check_code(nodes: Sequence[NodeFacts]) -> None:
    """Raises ValueError where a node has other code than the command: its actors would not be those that were
    tested."""
    ours = code_version()
    for node in nodes:
        if node.code != ours:
            has = f"has blockyard {node.code}" if node.code else "has no blockyard that says its version"
            raise ValueError(
                f"node {node.address} {has}, this command is {ours}: install the same on every node, or ship it "
                "with --ship-code"
            )


def differ_in_bfloat16(nodes: Sequence[NodeFacts]) -> bool:
    """Tell whether workers on their CPUs would choose data types that do not go together."""
    return len({node.has_bfloat16 for node in nodes}) > 1


def findings(nodes: Sequence[NodeFacts], here: Mapping[str, str | None], python: str) -> Iterator[Finding]:
    """What doctor says of each node, compared with the packages and the Python of this machine."""
    if differ_in_bfloat16(nodes):
        without = ", ".join(node.address for node in nodes if not node.has_bfloat16)
        told = f"no bfloat16 instructions on {without}: workers on CPUs all compute in float32 (see --dtype)"
        yield Finding(verdict="warn", subject="data type", detail=told)
    for node in nodes:
        yield _versions(node, here, python)
        yield _code(node)
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


def _problem(node: NodeFacts, subject: str, problem: str, sound: str) -> Finding:
    return _of(node, "fail" if problem else "ok", f"{subject}: {problem or sound}")


def _of(node: NodeFacts, verdict: Verdict, detail: str) -> Finding:
    return Finding(verdict=verdict, subject=node.address, detail=detail)


def _minor(python: str) -> str:
    return ".".join(python.split(".")[:2])
