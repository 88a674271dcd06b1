"""A Ray cluster that existed before: `up --address` joins it, and `down` ends our actors and nothing of Ray's."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockyard.deploy.machine.processes import ProcessIdentity, is_alive, session_members
from blockyard.deploy.ray.head import RayHead
from blockyard.router.client import Client

from tests.system.harness import Command, eventually, remembered_state

from .ray_nodes import operators_head
from .rig import CHECKPOINT, SIMULATED


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with operators_head() as head:
        yield head


TWO_SUPERVISORS = """
import asyncio, sys, ray
from blockyard.deploy.supervision.desired_state import DesiredState, RayDesiredStateStore
from blockyard.deploy.supervision.leadership import RayEpochs, SupersededError, claim_next
ray.init(sys.argv[1], log_to_driver=False)
old, new = claim_next(RayEpochs("two")), claim_next(RayEpochs("two"))
claim_next(RayEpochs("two-more"))
new.check()
try:
    old.check()
    raise AssertionError("both lead")
except SupersededError as error:
    print(error)
olds, news = (RayDesiredStateStore("two", claim.number) for claim in (old, new))
asyncio.run(news.save(DesiredState(num_workers=2)))
asyncio.run(olds.save(DesiredState(num_workers=9)))
print(news.load().num_workers)
news.forget_now()
print(news.load(), claim_next(RayEpochs("two")).number)
"""


def actors_of(head: RayHead) -> list[ProcessIdentity]:
    """Return the processes that Ray has titled as our actors."""
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
    assert result.stdout.splitlines()[0].endswith(", open to anybody who can reach 0.0.0.0")
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
    check_logs_through_the_dashboard(command)
    assert command.run("down").returncode == 0
    assert eventually(lambda: actors_of(head) == [], seconds=10)
    assert all(is_alive(member) for member in before)
    assert not command.home.exists() or list(command.home.iterdir()) == []


def check_logs_through_the_dashboard(command: Command) -> None:
    logs = command.run("logs")
    assert logs.returncode == 0, logs.stderr
    names = {line.split()[0] for line in logs.stdout.splitlines()}
    assert names == {"worker-0", "worker-1", "worker-2", "router-0", "router-1", "supervisor"}
    assert "worker worker-2 serves" in command.run("logs", "worker-2").stdout
    assert "known: router-0" in command.run("logs", "worker-9").stderr
    with command.start("logs", "worker-1", "-f") as following:
        assert following.stdout is not None
        watchdog = threading.Timer(60, following.kill)
        watchdog.start()
        while "registered in the prefix index" not in following.stdout.readline():
            assert following.poll() is None
        assert command.run("drain", "worker-1").returncode == 0
        while "drained" not in following.stdout.readline():
            assert following.poll() is None
        following.send_signal(signal.SIGINT)
        assert following.wait(60) == 0
        watchdog.cancel()
    assert command.run("resume", "worker-1").returncode == 0


def test_of_two_clusters_of_one_name_that_come_at_once_one_comes_up(head: RayHead, tmp_path: Path) -> None:
    """Run `up` from two homes, as from two machines: the refused one leaves the other alone."""
    twins = [Command(home=tmp_path / name, cluster="twin") for name in ("one", "other")]
    arguments = ("up", *SIMULATED, "--workers", "1", "--router-port", "0", "--address", head.address)
    starts = [twin.start(*arguments) for twin in twins]
    errors = [start.communicate()[1] for start in starts]
    codes = [start.returncode for start in starts]
    assert sorted(codes) == [0, 1], errors
    winner, loser = twins[codes.index(0)], twins[codes.index(1)]
    try:
        assert "already has a cluster called 'twin'" in errors[codes.index(1)]
        assert not loser.home.exists() or list(loser.home.iterdir()) == []
        again = loser.run(*arguments)
        assert again.returncode == 1
        assert "already has a cluster called 'twin'" in again.stderr
        with Client(remembered_state(winner).routers[0]) as client:
            assert client.generate("one", max_tokens=4, ignore_eos=True).finish.completion_tokens == 4
    finally:
        assert winner.run("down", "--drain", "0").returncode == 0
    assert eventually(lambda: actors_of(head) == [], seconds=10)


def test_a_worker_that_cannot_start_fails_up_with_its_reason(head: RayHead, tmp_path: Path) -> None:
    command = Command(home=tmp_path / "home", cluster="small")
    beyond_the_context = ("--index-stride-tokens", "4096")
    result = command.run("up", *SIMULATED, *beyond_the_context, "--address", head.address)
    assert result.returncode == 1
    assert "worker-0 does not start: " in result.stderr
    assert "Traceback" not in result.stderr
    assert eventually(lambda: actors_of(head) == [], seconds=10)
    assert not command.home.exists() or list(command.home.iterdir()) == []


def test_a_cluster_whose_state_file_is_lost_is_found_ended_and_started_again(
    head: RayHead, tmp_path: Path
) -> None:
    """Lose the home of `up`, use the cluster from two other homes, end it from one, and start its export."""
    lost, other, third = (
        Command(home=tmp_path / name, cluster="lost") for name in ("lost", "other", "third")
    )
    found = ("--address", head.address)
    small = ("--workers", "1", "--cpus-per-worker", "0.25", "--max-requests", "77", "--http-port", "0")
    assert lost.run("up", *SIMULATED, *small, *found).returncode == 0
    private_redis = remembered_state(lost).redis
    assert private_redis is not None
    (lost.home / "lost.json").unlink()
    refused = lost.run("up", *SIMULATED, *small, *found)
    assert "`blockyard down` find it with --address" in refused.stderr
    told = lost.run("scale", "2")
    assert "`blockyard status --address HEAD:6379 --cluster lost`" in told.stderr
    scaled = other.run("scale", "2", *found)
    assert scaled.returncode == 0, scaled.stderr
    assert (
        other.run("model", "add", str(CHECKPOINT), "--name", "second", "--max-num-seqs", "7").returncode == 0
    )
    for command in (other, third, lost):
        assert {place["phase"] for place in command.json("status", *found)["places"]} == {"serving"}
        assert remembered_state(command).routers
    (third.home / "lost.json").write_text('{"cluster": "lo')  # half written
    exported = third.run("export", *found)
    assert exported.returncode == 0, exported.stderr
    assert other.run("down").returncode == 0
    assert eventually(lambda: actors_of(head) == [], seconds=10)
    assert not is_alive(private_redis.process)
    for command in ("status", "scale"):
        told = third.run(*((command, "2") if command == "scale" else (command,)))
        assert told.returncode == 1
        assert "it was ended from another place" in told.stderr
    ended = third.run("down")
    assert (ended.returncode, "had ended before" in ended.stdout) == (0, True), ended.stderr
    file = tmp_path / "cluster.toml"
    file.write_text(exported.stdout)
    again = third.run("up", "--config", str(file))
    assert again.returncode == 0, again.stderr
    assert third.run("export").stdout == exported.stdout
    told = lost.run("down")
    assert told.returncode == 1
    assert "another one of this name runs now" in told.stderr
    assert lost.run("down", "--forget").returncode == 0
    assert lost.run("down", *found).returncode == 0
    assert eventually(lambda: actors_of(head) == [], seconds=10)


def test_a_wrong_token_of_ray_names_its_file(
    head: RayHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "token"
    wrong.write_text("ab" * 32)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(wrong))
    command = Command(home=tmp_path / "home", cluster="guest")
    for arguments in (("status",), ("scale", "2"), ("down",), ("export",), ("up", *SIMULATED)):
        told = command.run(*arguments, "--address", head.address)
        assert told.returncode == 1
        assert f"refuses the token in {wrong}" in told.stderr
        assert "Traceback" not in told.stderr


def test_the_newest_epoch_leads_and_a_late_write_of_an_older_one_changes_nothing(head: RayHead) -> None:
    """Epochs outlive `down`, so that a supervisor of an earlier cluster never leads a later one of its name."""
    command = [sys.executable, "-c", TWO_SUPERVISORS, head.address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["epoch 2 leads now, not 1", "2", "None 3"]
