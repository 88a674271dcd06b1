"""A Ray cluster that was there before us: `up --address` joins it, `down` ends our actors and nothing of
Ray's."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockyard.deploy.processes import ProcessIdentity, end_session, is_alive, session_members
from blockyard.deploy.ray_head import RayHead, start_head
from blockyard.router.client import Client

from .harness import Command, eventually, remembered_state

pytestmark = pytest.mark.cluster

SIMULATED = ("--model", "demo", "--engine", "simulated", "--device", "cpu", "--kv-cache-memory", "18MiB")


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    """An operator's Ray. Its folder's path must be short: Ray puts sockets in it."""
    directory = Path(tempfile.mkdtemp(prefix="by-test-", dir="/tmp"))
    head = start_head(directory, num_cpus=2)
    recorded = session_members(head.session)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "token")
        environment.setenv("RAY_AUTH_TOKEN_PATH", str(head.token_path))
        yield head
    end_session(head.session, recorded)
    shutil.rmtree(directory)


def actors_of(head: RayHead) -> list[ProcessIdentity]:
    """Processes that Ray has titled as our actors."""
    titles = {member: Path(f"/proc/{member.pid}/cmdline") for member in session_members(head.session)}
    names = (b"ray::WorkerActor", b"ray::RouterActor", b"ray::Supervisor")
    return [member for member, title in titles.items() if title.read_bytes().startswith(names)]


def test_up_joins_a_ray_cluster_and_down_leaves_it_as_it_was(head: RayHead, tmp_path: Path) -> None:
    command = Command(home=tmp_path / "home", cluster="guest")
    before = session_members(head.session)
    placed = ("--workers", "3", "--routers", "2", "--separate-ports", "--address", head.address)
    result = command.run("up", *SIMULATED, *placed)
    assert result.returncode == 0, result.stderr
    assert len(actors_of(head)) == 6
    remembered = remembered_state(command)
    assert len(remembered.routers) == 2
    for router in remembered.routers:
        with Client(router) as client:
            answer = client.generate("one two three", max_tokens=20, ignore_eos=True)
            assert answer.finish.completion_tokens == 20
            assert len(client.list_workers()) == 3
    assert command.run("down").returncode == 0
    assert eventually(lambda: actors_of(head) == [], seconds=10)
    assert all(is_alive(member) for member in before)
    assert not command.home.exists() or list(command.home.iterdir()) == []


def test_a_worker_that_cannot_start_fails_up_with_its_reason(head: RayHead, tmp_path: Path) -> None:
    command = Command(home=tmp_path / "home", cluster="small")
    too_small = ("--model", "demo", "--device", "cpu", "--kv-cache-memory", "100KiB")
    result = command.run("up", *too_small, "--address", head.address)
    assert result.returncode == 1
    assert "worker-0 does not start: ValueError" in result.stderr
    assert "Traceback" not in result.stderr
    assert eventually(lambda: actors_of(head) == [], seconds=10)
    assert not command.home.exists() or list(command.home.iterdir()) == []
