"""A Ray cluster that was there before us: `up --address` joins it, `down` ends our actors and nothing of
Ray's."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockyard import deploy
from blockyard.deploy.processes import ProcessIdentity, is_alive, session_members
from blockyard.deploy.ray_head import RayHead
from blockyard.router.client import Client

from .harness import Command, eventually, remembered_state
from .ray_nodes import operators_head

pytestmark = [pytest.mark.cluster, pytest.mark.ray]

DEMO_CHECKPOINT = Path(deploy.__file__).parent / "demo_model" / "checkpoint"
SIMULATED = ("--model", "demo", "--engine", "simulated", "--device", "cpu", "--kv-cache-memory", "18MiB")


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with operators_head() as head:
        yield head


def actors_of(head: RayHead) -> list[ProcessIdentity]:
    """Processes that Ray has titled as our actors."""
    titles = {member: Path(f"/proc/{member.pid}/cmdline") for member in session_members(head.session)}
    names = (b"ray::WorkerActor", b"ray::RouterActor", b"ray::Supervisor")
    return [member for member, title in titles.items() if title.read_bytes().startswith(names)]


def test_up_joins_a_ray_cluster_and_down_leaves_it_as_it_was(head: RayHead, tmp_path: Path) -> None:
    command = Command(home=tmp_path / "home", cluster="guest")
    before = session_members(head.session)
    placed = ("--workers", "3", "--routers", "2", "--separate-ports", "--address", head.address)
    result = command.run("up", *SIMULATED, *placed, "--host", "0.0.0.0")
    assert result.returncode == 0, result.stderr
    assert "warning: WHOEVER REACHES 0.0.0.0 MAY CALL EVERYTHING" in result.stderr
    assert result.stdout.splitlines()[0].endswith(", for whoever reaches 0.0.0.0")
    assert len(actors_of(head)) == 6
    remembered = remembered_state(command)
    assert len(remembered.routers) == 2
    for router in remembered.routers:
        # Clients are told the address of the node that has it.
        assert router.rpartition(":")[0] == head.address.rpartition(":")[0]
        with Client(router) as client:
            answer = client.generate("one two three", max_tokens=20, ignore_eos=True)
            assert answer.finish.completion_tokens == 20
            assert len(client.list_workers()) == 3
    assert command.run("down").returncode == 0
    assert eventually(lambda: actors_of(head) == [], seconds=10)
    assert all(is_alive(member) for member in before)
    assert not command.home.exists() or list(command.home.iterdir()) == []


def test_of_two_clusters_of_one_name_that_come_at_once_one_comes_up(head: RayHead, tmp_path: Path) -> None:
    """From two homes, as from two machines: the one that is refused leaves the other alone."""
    twins = [Command(home=tmp_path / name, cluster="twin") for name in ("one", "other")]
    arguments = ("up", *SIMULATED, "--workers", "1", "--router-port", "0", "--address", head.address)
    starts = [twin.start(*arguments) for twin in twins]
    errors = [start.communicate()[1] for start in starts]
    codes = [start.returncode for start in starts]
    assert sorted(codes) == [0, 1], errors
    winner, loser = twins[codes.index(0)], twins[codes.index(1)]
    try:
        assert "has a cluster called 'twin' already" in errors[codes.index(1)]
        assert not loser.home.exists() or list(loser.home.iterdir()) == []
        again = loser.run(*arguments)
        assert again.returncode == 1
        assert "has a cluster called 'twin' already" in again.stderr
        with Client(remembered_state(winner).routers[0]) as client:
            assert client.generate("one", max_tokens=4, ignore_eos=True).finish.completion_tokens == 4
    finally:
        assert winner.run("down", "--drain", "0").returncode == 0
    assert eventually(lambda: actors_of(head) == [], seconds=10)


def test_a_worker_that_cannot_start_fails_up_with_its_reason(head: RayHead, tmp_path: Path) -> None:
    command = Command(home=tmp_path / "home", cluster="small")
    model = tmp_path / "model"
    shutil.copytree(DEMO_CHECKPOINT, model)
    (model / "model.safetensors").write_bytes(b"not what the name says")
    result = command.run("up", "--model", str(model), "--device", "cpu", "--address", head.address)
    assert result.returncode == 1
    assert "worker-0 does not start: " in result.stderr
    assert "Traceback" not in result.stderr
    assert eventually(lambda: actors_of(head) == [], seconds=10)
    assert not command.home.exists() or list(command.home.iterdir()) == []
