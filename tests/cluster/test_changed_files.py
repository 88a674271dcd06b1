"""New weights at the path of a model that a real cluster serves: nothing is stopped unasked, and each way out works."""

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from blockyard.router.client import BlockyardError

from .harness import UP, Cluster, Command, eventually, remembered_state

pytestmark = [pytest.mark.ci, pytest.mark.cluster, pytest.mark.ray]

DEMO = Path(__file__).parents[2] / "deploy" / "demo_model" / "checkpoint"
WAIT_SECONDS = 120.0


def change_weights(folder: Path) -> None:
    """Write a shard with another last bit, as `cp` over the old file does."""
    shard = folder / "model.safetensors"
    content = bytearray(shard.read_bytes())
    content[-2] ^= 1
    shard.write_bytes(content)


def kill(command: Command, name: str) -> None:
    os.kill(command.place(name)["pid"], signal.SIGKILL)


def answers(cluster: Cluster) -> bool:
    try:
        with cluster.client() as client:
            return client.generate("def main():", max_tokens=2, timeout_seconds=20.0).token_ids != ()
    except BlockyardError:
        return False


@contextmanager
def steady_load(cluster: Cluster) -> Iterator[list[bool]]:
    """Ask again and again. The list tells of each answer whether it came."""
    came, stop = [], threading.Event()

    def ask() -> None:
        while not stop.is_set():
            came.append(answers(cluster))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield came
    finally:
        stop.set()
        asking.join()


def test_changed_weights_stop_no_worker_unasked_and_are_served_by_each_way_out(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO, tmp_path / "tuned"))
    command = Command(home=tmp_path / "home", cluster="files")
    arguments = [str(folder) if each == "demo" else each for each in UP]
    started = command.run(*arguments, "--cpus-per-worker", "0.25")
    assert started.returncode == 0, started.stderr
    try:
        cluster = Cluster(command=command, state=remembered_state(command))
        with steady_load(cluster) as came:
            change_weights(folder)
            for names in ((), ("worker-1",), ("router-0",)):
                refused = command.run("restart", *names)
                assert refused.returncode == 1
                assert f"the files at {folder} changed: model.safetensors" in refused.stderr
                assert "blockyard model update" in refused.stderr
            kill(command, "worker-0")  # It starts again with the new files.
            assert eventually(lambda: command.place("worker-0")["phase"] == "refused", seconds=WAIT_SECONDS)
            assert "other model files" in command.place("worker-0")["refusal"]
            assert "other model files" in command.run("status").stdout.replace("\n", " ")
            updated = command.json("model", "update", "tuned")
            assert updated["workers"] == ["tuned-2-worker-0", "tuned-2-worker-1"]
            places = command.json("status")["places"]
            assert {each["name"]: each["phase"] for each in places} == dict.fromkeys(
                ("tuned-2-worker-0", "tuned-2-worker-1", "router-0"), "serving"
            )
            before_the_crash = len(came)
            assert answers(cluster)
        assert before_the_crash > 0
        assert all(came), "no request has failed"
        change_weights(folder)
        for name in updated["workers"]:
            kill(command, name)
        assert eventually(lambda: answers(cluster), seconds=WAIT_SECONDS), (
            "workers with new files alone are served"
        )
        assert eventually(
            lambda: {place["phase"] for place in command.json("status")["places"]} == {"serving"},
            seconds=WAIT_SECONDS,
        )
        change_weights(folder)
        assert command.run("restart", "tuned-2-worker-0").returncode == 1
        restarted = command.run("restart", "--new-files")
        assert restarted.returncode == 0, restarted.stderr
        assert answers(cluster)
        failed = command.run("model", "update", "tuned", "--path", str(tmp_path / "home"))
        assert failed.returncode != 0
        assert answers(cluster), "an update to files that are no model changes nothing"
    finally:
        command.run("down", "--drain", "0")
