"""New weights at the path of a model that a real cluster serves: nothing is stopped unasked, and each way out works."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess

from blockyard.router.client import BlockyardError

from tests.system.harness import UP, Cluster, Command, eventually, remembered_state

from .rig import CHECKPOINT

WAIT_SECONDS = 120.0


def change_weights(folder: Path) -> None:
    """Write a shard with another last bit, as `cp` over the old file does."""
    shard = folder / "model.safetensors"
    content = bytearray(shard.read_bytes())
    content[-2] ^= 1
    shard.write_bytes(content)


def run(command: Command, *arguments: str) -> CompletedProcess[str]:
    """Run a command, once more for each time that Ray is too busy to answer it."""
    for _ in range(5):
        result = command.run(*arguments)
        if "does not answer" not in result.stderr:
            break
    return result


def places(command: Command) -> dict[str, dict[str, str]]:
    """Workers and routers by their names."""
    found = json.loads(run(command, "status", "--output", "json").stdout)["places"]
    return {place["name"]: place for place in found}


def phases(command: Command) -> dict[str, str]:
    return {name: place["phase"] for name, place in places(command).items()}


def kill(command: Command, name: str) -> None:
    os.kill(int(places(command)[name]["pid"]), signal.SIGKILL)


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
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "tuned"))
    new = ("tuned-2-worker-0", "tuned-2-worker-1")
    command = Command(home=tmp_path / "home", cluster="files")
    arguments = [str(folder) if each == "demo" else each for each in UP]
    started = command.run(*arguments, "--cpus-per-worker", "0.25")
    assert started.returncode == 0, started.stderr
    try:
        cluster = Cluster(command=command, state=remembered_state(command))
        with steady_load(cluster) as came:
            change_weights(folder)
            for names in ((), ("worker-1",), ("router-0",)):
                refused = run(command, "restart", *names)
                assert refused.returncode == 1
                assert f"the files at {folder} changed: model.safetensors" in refused.stderr
                assert "blockyard model update" in refused.stderr
            kill(command, "worker-0")  # It starts again with the new files.
            assert eventually(lambda: phases(command)["worker-0"] == "refused", seconds=WAIT_SECONDS)
            assert "other model files" in places(command)["worker-0"]["refusal"]
            assert "other model files" in " ".join(run(command, "status").stdout.split())
            updated = run(command, "model", "update", "tuned")
            assert updated.returncode == 0, updated.stderr
            assert phases(command) == dict.fromkeys((*new, "router-0"), "serving")
            before_the_crash = len(came)
            assert answers(cluster)
        assert before_the_crash > 0
        assert all(came), "no request has failed"
        change_weights(folder)
        for name in new:
            kill(command, name)
        assert eventually(lambda: answers(cluster), seconds=WAIT_SECONDS), (
            "workers with new files alone are served"
        )
        assert eventually(lambda: set(phases(command).values()) == {"serving"}, seconds=WAIT_SECONDS)
        change_weights(folder)
        assert "changed" in run(command, "restart", new[0]).stderr
        restarted = run(command, "restart", "--new-files")
        assert restarted.returncode == 0, restarted.stderr
        assert answers(cluster)
        failed = run(command, "model", "update", "tuned", "--path", str(tmp_path / "home"))
        assert failed.returncode != 0
        assert answers(cluster), "an update to files that are no model changes nothing"
    finally:
        command.run("down", "--drain", "0")
