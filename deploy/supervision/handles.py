"""Handles: a cluster as Ray knows it, for a command on a machine whose state file is missing, damaged or out of date.

Owns reading a cluster from its desired state (desired_state.py), and telling whether a state file is still that of the
cluster that runs. Whoever may read Ray's store may also run programs on its nodes. Still, no secret is in a handle.
"""

from collections.abc import Callable
from typing import Any

from blockyard.deploy.dashboard.announcement import key_of as report_key
from blockyard.deploy.machine.state import (
    AnotherClusterError,
    ClusterState,
    EndedElsewhereError,
    of_handle,
    which,
)
from blockyard.deploy.supervision import reports
from blockyard.deploy.supervision.desired_state import KV_NAMESPACE, DesiredState, decoded, key_of, newest_key
from blockyard.deploy.supervision.replicas import NAMESPACE_PREFIX, namespace
from ray.exceptions import RayError


def desired_of(service: Any, cluster: str, seconds: float) -> DesiredState | None:
    """Return the desired state of a cluster, or None if Ray has none. `service` is Ray's control service.

    Raise RuntimeError if Ray does not answer, ValueError for the state of another version.
    """
    name = namespace(cluster)

    def newest() -> bytes | None:
        keys = service.internal_kv_keys(key_of(name, ""), namespace=KV_NAMESPACE, timeout=seconds)
        found: bytes | None = service.internal_kv_get(
            newest_key(name, keys), namespace=KV_NAMESPACE, timeout=seconds
        )
        return found

    text = _asked(newest, seconds)
    try:
        return None if text is None else decoded(text)
    except (ValueError, TypeError, LookupError, AttributeError):
        raise _other_version(cluster) from None


def _other_version(cluster: str) -> ValueError:
    return ValueError(
        f"cluster {cluster!r} was started by another version of Blockyard: use that version's command"
    )


def find(service: Any, cluster: str, address: str, token_path: str | None, seconds: float) -> ClusterState:
    """Return a cluster's state as Ray knows it. Raise ValueError, which names the clusters that run, without one."""
    desired = desired_of(service, cluster, seconds)
    if desired is None:
        others = ", ".join(_clusters(service, seconds))
        raise ValueError(
            f"Ray at {address} has no cluster {cluster!r}"
            + (f", only {others} (--cluster)" if others else ", and no other")
        )
    first = [desired.handle.get("model", "").partition(", ")[0]] if desired.serves_first else []
    workers = sum(plan.num_workers for plan in desired.further_models)
    try:
        return of_handle(
            desired.handle,
            cluster=cluster,
            model=", ".join([*first, *(plan.id for plan in desired.further_models)]),
            num_workers=workers + (desired.num_workers if desired.serves_first else 0),
            ray_address=address,
            ray_token_path=token_path,
            routers=tuple(dict.fromkeys(router for _, router, _ in desired.addresses)),
            gateways=tuple(dict.fromkeys(gateway for _, _, gateway in desired.addresses if gateway)),
            is_supervised=True,
        )
    except (ValueError, TypeError, LookupError, AttributeError):
        raise _other_version(cluster) from None


def check_is_of(service: Any, cluster: ClusterState, seconds: float) -> None:
    """Check that the cluster of a state file runs on the Ray that this control service belongs to.

    Raise EndedElsewhereError or AnotherClusterError, and what `desired_of` raises.
    """
    desired, named = desired_of(service, cluster.cluster, seconds), which(cluster.cluster)
    if desired is not None:
        theirs = desired.handle.get("identity", "")
        if theirs and cluster.identity and theirs != cluster.identity:
            raise AnotherClusterError(
                f"this machine remembers a cluster {cluster.cluster!r} that has ended, and another one of this name "
                f"runs now, started on {desired.handle.get('machine') or 'another machine'}: `blockyard down --forget"
                f"{named}` forgets the old one, then `blockyard status --address {cluster.ray_address}{named}` finds "
                "the new one"
            )
        return
    # A supervisor that has just begun, or one of an older version, has a report alone.
    key = report_key(cluster.cluster)
    report = _asked(
        lambda: service.internal_kv_get(key, namespace=reports.NAMESPACE, timeout=seconds), seconds
    )
    if report is None:
        raise EndedElsewhereError(
            f"Ray at {cluster.ray_address} has no cluster {cluster.cluster!r} any more: it was ended from another "
            f"place, or Ray was started anew. `blockyard down{named}` removes what is left of it here; then "
            "`blockyard up` may start it again"
        )


def _clusters(service: Any, seconds: float) -> list[str]:
    prefix = key_of(NAMESPACE_PREFIX)
    keys = _asked(lambda: service.internal_kv_keys(prefix, namespace=KV_NAMESPACE, timeout=seconds), seconds)
    return sorted({key.removeprefix(prefix).partition(b":")[0].decode() for key in keys})


def _asked(ask: Callable[[], Any], seconds: float) -> Any:
    try:
        return ask()
    except RayError as error:
        raise RuntimeError(
            f"Ray's control service does not answer within {seconds:.1f} s ({type(error).__name__}): try again"
        ) from None
