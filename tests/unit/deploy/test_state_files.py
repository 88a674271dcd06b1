"""State files: what they hold, whom they name, and what each command says where one is lost, damaged or old."""

import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blockyard.deploy.dashboard.announcement import key_of as report_key
from blockyard.deploy.lifecycle import cluster, driver
from blockyard.deploy.lifecycle.cluster_spec import spec_of
from blockyard.deploy.lifecycle.driver import without_head
from blockyard.deploy.lifecycle.shape import Shape
from blockyard.deploy.machine import state
from blockyard.deploy.machine.processes import ProcessIdentity, boot_id, identify
from blockyard.deploy.ray.head import RayConnectError, use_token
from blockyard.deploy.settings.options import found_address, ray_address
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.deploy.supervision import reports
from blockyard.deploy.supervision.desired_state import KV_NAMESPACE, DesiredState, decoded, encoded, key_of
from blockyard.deploy.supervision.handles import check_is_of, find
from blockyard.deploy.supervision.replicas import namespace
from blockyard.worker.config import EngineConfig

from .rig import SECRET, cluster_state, refusal

RAY = "10.0.0.7:6379"

STARTED = state.ClusterState(
    cluster="default",
    model="demo",
    secret="CANARY-SECRET",
    redis_url="redis://worker:CANARY-PASSWORD@127.0.0.1:6380/0",
    router_redis_url="redis://router:CANARY-PASSWORD@127.0.0.1:6380/0",
    ray_address="127.0.0.1:6379",
    ray_token_path="/CANARY-PATH/ray-token",
    identity="1f2e",
    machine="node-7",
    boot_id=boot_id(),
    directory="/tmp/by-x",
    redis=state.RedisState(
        process=ProcessIdentity(pid=7, start_ticks=8), port=6380, log_path="/tmp/by-x/redis.log"
    ),
    starter=ProcessIdentity(pid=2**22 + 1, start_ticks=1),
)

SERVED = {
    "routers": ("10.0.0.7:50051",),
    "gateways": ("10.0.0.7:8000",),
    "num_workers": 3,
    "is_supervised": True,
}


class Store:
    """Ray's control service, as far as its key-value store goes."""

    def __init__(self, *states: tuple[str, DesiredState]) -> None:
        # An earlier supervisor wrote late, and a still earlier one had no epochs: the newest epoch counts.
        self.entries = {
            (KV_NAMESPACE, key_of(namespace(name), epoch)): encoded(replace(desired, num_workers=workers))
            for name, desired in states
            for epoch, workers in ((10, desired.num_workers), (9, 90), (None, 99))
        }

    def internal_kv_get(self, key: bytes, *, namespace: bytes, timeout: float) -> bytes | None:
        return self.entries.get((namespace, key))

    def internal_kv_keys(self, prefix: bytes, *, namespace: bytes, timeout: float) -> list[bytes]:
        return [key for of, key in self.entries if of == namespace and key.startswith(prefix)]


def desired(cluster: state.ClusterState = STARTED, **handle: Any) -> DesiredState:
    shape = Shape(num_workers=1, num_cpus=0.5, num_gpus=0.0)
    spec = spec_of(cluster, UpOptions(engine=EngineConfig(model="demo")), shape)
    return DesiredState(
        num_workers=3,
        addresses=(("router-0", "10.0.0.7:50051", "10.0.0.7:8000"), ("router-1", "10.0.0.7:50051", "")),
        handle={**spec.handle, **handle},
    )


def test_a_handle_has_no_secret_and_survives_rays_store() -> None:
    stored = encoded(desired())
    assert b"CANARY" not in stored
    assert len(stored) < 16_384
    assert decoded(stored) == decoded(encoded(decoded(stored)))


def test_a_cluster_is_found_without_its_state_file_as_it_is_now() -> None:
    found = find(Store(("default", desired())), "default", RAY, None, 1.0)
    kept_here = {
        "secret": "",
        "redis_url": None,
        "router_redis_url": None,
        "ray_token_path": None,
        "starter": None,
    }
    assert found == replace(STARTED, **SERVED, **kept_here, ray_address=RAY)
    assert state.keep(found)[0] == state.load("default") == found
    with pytest.raises(ValueError, match=f"Ray at {RAY} has no cluster 'mine', only default"):
        find(Store(("default", desired())), "mine", RAY, None, 1.0)


def test_another_machine_names_what_it_cannot_end() -> None:
    found = find(Store(("default", desired(boot_id="of another"))), "default", RAY, None, 1.0)
    assert (found.directory, found.redis) == (None, None)
    assert found.elsewhere == ("its private Redis", "/tmp/by-x")
    assert not found.recorded_processes()


def test_a_found_cluster_leaves_what_the_file_of_the_same_one_knows_and_spares_another_ones() -> None:
    found = find(Store(("default", desired())), "default", RAY, None, 1.0)
    state.save(STARTED)
    assert state.keep(found)[0] == replace(STARTED, **SERVED, ray_address=RAY) == state.load("default")
    other = replace(STARTED, identity="another")
    state.save(other)
    kept, note = state.keep(found)
    assert (kept, state.load("default")) == (found, other)
    assert "is of another cluster of this name, and stays" in note
    state.update(replace(found, num_workers=9))
    state.forget(found)
    assert state.load("default") == other
    state.state_path("default").write_text("{")
    assert state.keep(found)[0] == state.load("default") == found


def test_a_state_file_of_a_cluster_that_ended_elsewhere_is_told_from_a_silent_supervisor() -> None:
    joined, store = replace(STARTED, head=None), Store(("default", desired()))
    check_is_of(store, joined, 1.0)
    check_is_of(store, replace(joined, identity=""), 1.0)  # An older version wrote it.
    with pytest.raises(
        state.AnotherClusterError, match="another one of this name runs now, started on node-7"
    ):
        check_is_of(store, replace(joined, identity="another"), 1.0)
    store.entries.clear()
    with pytest.raises(state.EndedElsewhereError, match="`blockyard down` removes what is left of it here"):
        check_is_of(store, joined, 1.0)
    store.entries[reports.NAMESPACE, report_key("default")] = b"any"
    check_is_of(store, joined, 1.0)  # An older supervisor, or one that has just begun.


@pytest.mark.parametrize(
    ("joined", "words"),
    [
        (True, ("60 s after its death", "`blockyard down --forget`", "start Ray again on every node")),
        (False, ("60 s after its death", "`blockyard down`, then `blockyard up`")),
    ],
)
def test_a_dead_control_service_is_told_with_the_time_that_ray_really_gives(
    joined: bool, words: tuple[str, ...]
) -> None:
    head = None if joined else state.HeadState(session=1, processes=())
    told = without_head(replace(STARTED, head=head, reconnect_seconds=60.0))
    assert all(word in told for word in words), told
    assert "600" not in told


@pytest.mark.parametrize("content", [None, "", "\xff"])
def test_a_token_file_that_cannot_be_used_is_named_before_ray_aborts(
    content: str | None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.mkdir()
    path = home / "token"
    if content is not None:
        path.write_text(content)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
    with pytest.raises(RayConnectError, match=f"token file {path} cannot be used: .*RAY_AUTH_TOKEN_PATH"):
        use_token(str(path))


def test_addresses_mean_what_they_mean_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", RAY)
    assert ray_address("auto") == RAY
    assert ray_address("local") is None
    for wrong in ("ray://10.0.0.7:10001", "http://10.0.0.7:8265", "10.0.0.7"):
        monkeypatch.setenv("RAY_ADDRESS", wrong)
        with pytest.raises(ValueError, match="host:port"):
            ray_address("auto")
    with pytest.raises(ValueError, match="for `up` alone"):
        found_address("local")


def test_a_state_file_is_its_owners_alone_reads_back_the_same_and_shows_no_secret(home: Path) -> None:
    saved = cluster_state()
    state.save(saved)
    assert stat.S_IMODE(state.state_path("trial").stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert state.load("trial") == saved
    assert [entry.name for entry in home.iterdir()] == ["trial.json"]
    assert SECRET not in repr(saved)


def test_a_cluster_is_alive_by_its_processes_by_the_up_that_makes_it_or_by_the_ray_that_it_has_joined() -> (
    None
):
    starter = identify(os.getppid())
    assert starter is not None
    assert not cluster_state(ray_address="10.0.0.1:6379").anything_alive()
    assert cluster_state(ray_address="10.0.0.1:6379", head=None).anything_alive()
    making = cluster_state(starter=starter, head=None, redis=None, ray_address=None)
    assert making.anything_alive()
    gone = ProcessIdentity(pid=starter.pid, start_ticks=starter.start_ticks - 1)
    assert not replace(making, starter=gone).anything_alive()


def test_a_state_file_of_before_has_a_supervisor_to_say_goodbye_to() -> None:
    state.save(state.ClusterState(cluster="default", model="m", secret="s"))
    assert not state.load("default").is_supervised
    path = state.state_path("default")
    path.write_text(path.read_text().replace('"is_supervised": false,', ""))
    assert state.load("default").is_supervised


def test_an_end_without_a_drain_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(_: state.ClusterState) -> None:
        raise TimeoutError

    started = cluster_state(ray_address="127.0.0.1:1", is_supervised=True)
    monkeypatch.setattr(cluster, "owns_session", lambda *_: True)
    monkeypatch.setattr(cluster, "end_session", lambda *_: None)
    monkeypatch.setattr(cluster, "_remove_files", lambda _: None)
    monkeypatch.setattr(driver, "driver", silent)
    told: list[str] = []
    cluster.down(started, report=lambda progress: told.append(progress.warning))
    assert "routers and workers are killed, not drained: Ray does not answer (TimeoutError)" in told


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda document: {key: value for key, value in document.items() if key != name}


HALF_WRITTEN = "`blockyard status --address HEAD:6379` finds a cluster on Ray and writes the file anew"
WRONG = "does not say what `up` writes of a cluster"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (without("head"), (WRONG, "it lacks head")),
        (without("secret"), (WRONG, "it lacks secret")),
        (lambda document: document | {"head": {"session": 1}}, (WRONG, "'processes' is missing")),
        (lambda document: document | {"more": 1}, (WRONG, "it has more, unknown to this version")),
        (lambda document: document | {"redis": 5}, (WRONG, "'int' object")),
        (lambda document: [document], (WRONG, "it holds no JSON object but a list")),
        *((lambda _, text=text: text, (HALF_WRITTEN,)) for text in ("", '{"cluster": "def', "\0")),
    ],
)
@pytest.mark.parametrize("command", ["status", "down", "workers"])
def test_a_damaged_state_file_is_named_with_what_to_do(
    spoil: Callable[[dict[str, Any]], object], why: tuple[str, ...], command: str
) -> None:
    state.save(state.ClusterState(cluster="default", model="m", secret="CANARY"))
    path = state.state_path("default")
    spoilt = spoil(json.loads(path.read_text()))
    path.write_text(spoilt if isinstance(spoilt, str) else json.dumps(spoilt))
    told = refusal(command, code=1)
    assert told.startswith(f"Error: {path} ")
    assert all(words in told for words in why)
    assert WRONG not in why or told.endswith("end the cluster's processes, then delete the file")
    assert "CANARY" not in told
