"""sync.py is generated from aio.py, and both clients have the same calls."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from blockyard.router.client import AsyncClient, Client

from tools.blocking_client import SOURCE, TARGET, blocking

ROOT = Path(__file__).parents[3]


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.blocking_client", "--check"]
    return subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )


def test_the_committed_client_is_what_would_be_generated() -> None:
    assert (ROOT / TARGET).read_text(encoding="utf-8") == blocking(
        (ROOT / SOURCE).read_text(encoding="utf-8")
    )


def test_a_stale_file_fails_the_check_and_is_left_as_it_is(tmp_path: Path) -> None:
    source, target = tmp_path / SOURCE, tmp_path / TARGET
    source.parent.mkdir(parents=True)
    source.write_bytes((ROOT / SOURCE).read_bytes())
    assert check(tmp_path).returncode == 1
    target.write_bytes((ROOT / TARGET).read_bytes())
    assert check(tmp_path).returncode == 0
    source.write_text(source.read_text() + "\nEXTRA = 1\n")
    stale = check(tmp_path)
    assert (stale.returncode, stale.stdout) == (
        1,
        f"{TARGET} is out of date, run `python -m tools.blocking_client`\n",
    )
    assert target.read_bytes() == (ROOT / TARGET).read_bytes()


def test_a_phrase_that_no_longer_stands_in_the_source_is_named() -> None:
    source = (ROOT / SOURCE).read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="must have this phrase once: 'Belongs to the event loop"):
        blocking(source.replace("Belongs to the event loop", "Lives on the event loop"))
    with pytest.raises(ValueError, match=r"asynchronous words left: .*'aio'"):
        blocking(source + "\n# Sent by grpc.aio.\n")


def test_both_clients_have_the_same_calls_with_the_same_arguments() -> None:
    assert calls(AsyncClient) == calls(Client)


def calls(client: type) -> dict[str, list[str]]:
    return {
        name: [str(parameter) for parameter in inspect.signature(method).parameters.values()]
        for name, method in vars(client).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
