"""An interrupted `up` removes everything that it has started."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.system.harness import UP, Command, eventually

from .rig import processes_of


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        ("starting Ray", signal.SIGHUP),
        ("loading the model", signal.SIGTERM),
        ("loading the model", signal.SIGINT),
    ],
)
def test_an_interrupted_up_leaves_nothing(tmp_path: Path, stage: str, number: signal.Signals) -> None:
    command = Command(home=tmp_path / "home", cluster="interrupted")
    with command.start(*UP, stdin=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if stage in line:
                break
        assert eventually(lambda: len(processes_of(command.home)) > 2, seconds=60)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode != 0
    assert processes_of(command.home) == []
    assert not command.home.exists() or list(command.home.iterdir()) == []
